"""``python -m campaigns.families``: round trips of transformers' model families, plain and under FSDP2 on two ranks.

Each family is built tiny from its configuration. ``from_pretrained`` opens what ``save_model`` writes, ``load_model``
takes what ``save_pretrained`` writes, and a checkpoint is resumed: all bit for bit. The files are compared with those of
``save_pretrained``. It exits with 1 if one is wrong, unless transformers itself fails.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import transformers

from campaigns.families.catalogue import ALWAYS, Family, draw_families, find_family
from campaigns.families.round_trips import FSDP2, PLAIN
from campaigns.families.verdicts import Verdict, judge
from tests.helpers.pool import Ranks


def main() -> int:
    """Run all or some families. Return 1 if one is wrong."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.families", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="draws the further families (default: 1)")
    parser.add_argument("--more", type=int, default=40, help="how many further families (default: 40)")
    parser.add_argument("--family", action="append", help="only this one; may be given several times")
    parser.add_argument("--layout", action="append", choices=[PLAIN, FSDP2], help="(default: both)")
    options = parser.parse_args()
    names = options.family or ALWAYS
    families = [*map(find_family, names), *([] if options.family else draw_families(options.seed, options.more))]
    verdicts = []
    for verdict in _judge_all(families, options.layout or [PLAIN, FSDP2]):
        verdicts.append(verdict)
        print(verdict, flush=True)
    wrong = [verdict.family for verdict in verdicts if verdict.wrong]
    print(f"{len(verdicts)} families, {len(wrong)} wrong: {', '.join(wrong)}")
    return int(bool(wrong))


def _judge_all(families: list[Family], layouts: list[str]) -> Iterator[Verdict]:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    ranks = Ranks()
    for family in families:
        ranks.replace_old_ranks()
        with tempfile.TemporaryDirectory(prefix="rankless-") as folder:
            yield judge(family, layouts, ranks, Path(folder))
    ranks.close()


if __name__ == "__main__":
    sys.exit(main())
