"""``python -m campaigns.side_by_side --seconds 600``: runs every scenario in turn.

It proves "Jobs side by side" of ``docs/failure-model.md``. It is fastest with ``TMPDIR=/dev/shm``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from campaigns.side_by_side.scenarios import SCENARIOS, check_outcome, run_scenario
from tests.helpers.pool import Ranks


def main() -> int:
    """Run the campaign. Return 1 on a violation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=180, help="seconds in total (default: 180)")
    options = parser.parse_args()
    ranks, ends = Ranks(), time.monotonic() + options.seconds
    try:
        while time.monotonic() < ends:
            for name, scenario in SCENARIOS.items():
                with tempfile.TemporaryDirectory(prefix="rankless-") as path:
                    seen = ranks(len(scenario.actions), run_scenario, path, name, 10.0)
                    check_outcome(Path(path), name, seen)
                    print(f"{name}: {' | '.join(map(_format_counts, seen))}", flush=True)
    except AssertionError as why:  # also a violation that a job raised
        print(f"{name}: {why.__cause__ or why}")
        return 1
    finally:
        ranks.close()
    return 0


def _format_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {outcome}" for outcome, number in counts.items())


if __name__ == "__main__":
    sys.exit(main())
