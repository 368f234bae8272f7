"""``python -m campaigns.families``: round trips of transformers' model families, plain and under FSDP2 on two ranks.

Each family is built tiny from its configuration. ``from_pretrained`` opens what ``save_model`` writes, ``load_model``
takes what ``save_pretrained`` writes, and a checkpoint is resumed: all bit for bit. The files are compared with those
of ``save_pretrained``. It exits with 1 if a family is wrong, unless transformers itself fails.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import transformers

from campaigns.families.catalogue import ALWAYS, Family, draw_families, find_family
from campaigns.families.round_trips import FSDP2, PLAIN
from campaigns.families.table import write_table
from campaigns.families.verdicts import Outcome, Verdict, judge
from tests.helpers.pool import Ranks


def main() -> int:
    """Run all or some families. Return 1 if one is wrong."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.families", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="draws the further families (default: 1)")
    parser.add_argument("--more", type=int, default=40, help="how many further families (default: 40)")
    parser.add_argument("--family", action="append", help="only this one; may be given several times")
    parser.add_argument("--layout", action="append", choices=[PLAIN, FSDP2], help="(default: both)")
    parser.add_argument("--write", action="store_true", help="write the table in docs/optimizers-and-families.md")
    options = parser.parse_args()
    verdicts = []
    for verdict in _judge_all(options, options.layout or [PLAIN, FSDP2]):
        verdicts.append(verdict)
        print(verdict, flush=True)
    if options.write:
        write_table(verdicts)
    numbers = Counter(verdict.outcome for verdict in verdicts)
    print(", ".join(f"{number} {outcome.value}" for outcome, number in numbers.items()))
    return int(Outcome.WRONG in numbers)


def _judge_all(options: argparse.Namespace, layouts: list[str]) -> Iterator[Verdict]:
    """Yield the verdicts on the families that are always tried, and on so many others that can be built."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    ranks = Ranks()
    for name in options.family or ALWAYS:
        yield _judge_one(find_family(name), layouts, ranks)
    built = 0
    for family in () if options.family else draw_families(options.seed):
        if built == options.more:
            break
        yield (verdict := _judge_one(family, layouts, ranks))
        built += verdict.outcome is not Outcome.NOT_BUILT
    ranks.close()


def _judge_one(family: Family, layouts: list[str], ranks: Ranks) -> Verdict:
    ranks.replace_old_ranks()
    with tempfile.TemporaryDirectory(prefix="rankless-") as folder:
        return judge(family, layouts, ranks, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
