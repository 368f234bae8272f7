"""``python -m campaigns.drawn_training``: saves and loads drawn training states, and compares what is called exact.

It exits with 1 if a load calls a component exact and a value of it is another.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.helpers.drawn_cases import draw_case
from tests.helpers.drawn_training import check_case
from tests.helpers.pool import Ranks


def main() -> int:
    """Run the draws. Return 1 if one of them is wrong."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.drawn_training", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--count", type=int, default=500, help="the number of draws (default: 500)")
    options = parser.parse_args()
    outcomes, ranks = Counter[str](), Ranks()
    for seed in range(options.first, options.first + options.count):
        with tempfile.TemporaryDirectory(prefix="rankless-") as folder:
            try:
                outcomes[check_case(ranks, Path(folder), draw_case(seed))] += 1
            except Exception as error:  # noqa: BLE001 - reported by the campaign
                outcomes["wrong"] += 1
                print(f"WRONG: seed {seed}: {error!r:.1500}", flush=True)
    ranks.close()
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())))
    return int(outcomes["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
