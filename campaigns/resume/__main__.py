"""``python -m campaigns.resume --rounds 20``: disturbs many trainings, and reports problems.

It proves the promises of ``docs/guides/exact-resume.md``.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from itertools import count
from pathlib import Path

from campaigns.resume.interruptions import Outcome, interrupt_on_changing_ranks, interrupt_on_same_ranks
from campaigns.resume.training import TrainingConfig


def main() -> int:
    """Run the campaign. Return 1 if there was a problem."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="number of trainings of each kind (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--ranks", type=int, default=4, help="the most ranks of a training (default: 4)")
    options = parser.parse_args()
    failed = 0
    for number in range(options.rounds):
        for kind in ("same size", "other sizes"):
            moments = random.Random(f"{options.seed}/{number}/{kind}")
            with tempfile.TemporaryDirectory(prefix="rankless-") as folder:
                outcome = _interrupt_training(Path(folder), kind, options.ranks, moments)
            _print_outcome(f"{number} {kind}", outcome)
            failed += bool(outcome.problems)
    print(f"{failed} of {2 * options.rounds} trainings had problems")
    return int(bool(failed))


def _interrupt_training(folder: Path, kind: str, ranks: int, moments: random.Random) -> Outcome:
    plan = TrainingConfig(folder / "disturbed", workers=moments.choice([0, 2]))
    if kind == "same size":
        return interrupt_on_same_ranks(plan, moments.randint(1, ranks), moments)
    return interrupt_on_changing_ranks(plan, (moments.randint(1, ranks) for _ in count()), moments)


def _print_outcome(name: str, outcome: Outcome) -> None:
    path = ", ".join(
        f"{attempt.size} rank{'s' * (attempt.size > 1)} {attempt.end} at {attempt.step}" for attempt in outcome.attempts
    )
    print(f"{name}: {path}", *(f"  WRONG: {problem}" for problem in outcome.problems), sep="\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
