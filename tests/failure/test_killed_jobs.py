"""Tests jobs that are killed or told to stop, and resume: the short form of ``python -m campaigns.resume``."""

import random
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest

from campaigns.resume.ledger import Step, lasting, problems_with_losses, problems_with_samples
from campaigns.resume.rounds import DONE, other_sizes, same_size
from campaigns.resume.training import Plan


@pytest.mark.parametrize("workers", [0, 2])
def test_on_as_many_ranks_every_loss_is_that_of_an_undisturbed_run(tmp_path: Path, workers: int) -> None:
    plan = Plan(tmp_path / "disturbed", samples=80, workers=workers)
    outcome = same_size(plan, 2, random.Random(workers))
    assert not outcome.problems
    assert outcome.attempts[0].end != DONE


def test_on_other_numbers_of_ranks_every_sample_is_seen_once_an_epoch(tmp_path: Path) -> None:
    plan = Plan(tmp_path / "disturbed", samples=300)
    outcome = other_sizes(plan, cycle([4, 2, 3]), random.Random(6))
    assert not outcome.problems
    assert outcome.attempts[0].end != DONE
    # The second is mostly killed, too, and the third is on three; on a slow machine it may be done before.
    sizes = [attempt.size for attempt in outcome.attempts]
    assert len(sizes) >= 2
    assert sizes[:3] == [4, 2, 3][: len(sizes)]


# ---------------------------------------------------------------------------------------------------------------
# What looks at them would see it if something were wrong

HISTORY = [
    Step(0, 0, 1, "0x1.0p+0", (0,)),
    Step(0, 0, 2, "0x1.1p+0", (1,)),
    Step(0, 0, 3, "0x1.2p+0", (2,)),
    Step(1, 0, 2, "0x1.1p+0", (1,)),
    Step(1, 0, 3, "0x1.2p+0", (2,)),
]


def test_what_was_done_again_counts_once() -> None:
    assert [(item.attempt, item.step) for item in lasting(HISTORY)] == [(0, 1), (1, 2), (1, 3)]
    assert problems_with_samples(HISTORY, 3, 1) == []
    assert problems_with_losses(HISTORY, HISTORY[:3]) == []


def test_samples_seen_twice_or_never_are_told() -> None:
    wrong = [*HISTORY[:-1], replace(HISTORY[-1], samples=(0,))]
    assert problems_with_samples(wrong, 3, 1) == ["epoch 0: seen more than once: [0], never: [2]"]


def test_a_loss_or_a_batch_that_differs_is_told_and_so_is_what_was_not_done() -> None:
    for wrong in (replace(HISTORY[-1], loss="0x1.3p+0"), replace(HISTORY[-1], samples=(0,))):
        assert len(problems_with_losses([*HISTORY[:-1], wrong], HISTORY[:3])) == 1
    assert problems_with_losses(HISTORY[:2], HISTORY[:3]) == [
        "1 steps were never done, the first of them, by rank and step, (0, 3)"
    ]
    assert len(problems_with_losses(HISTORY, HISTORY[:2])) == 2
