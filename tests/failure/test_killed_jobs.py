"""Tests jobs that are killed or told to stop, and resume: the short form of ``python -m campaigns.resume``."""

import random
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest

from campaigns.resume.interruptions import DONE, interrupt_on_changing_ranks, interrupt_on_same_ranks
from campaigns.resume.step_log import Step, find_loss_problems, find_sample_problems, select_lasting_steps
from campaigns.resume.training import TrainingConfig
from tests.helpers.pairwise import first_of


@first_of(1, "workers", [0, 2])
def test_on_as_many_ranks_every_loss_is_that_of_an_undisturbed_run(tmp_path: Path, workers: int) -> None:
    plan = TrainingConfig(tmp_path / "disturbed", samples=80, workers=workers)
    outcome = interrupt_on_same_ranks(plan, 2, random.Random(workers))
    assert not outcome.problems
    assert outcome.attempts[0].end != DONE


@pytest.mark.full
def test_on_other_numbers_of_ranks_every_sample_is_seen_once_an_epoch(tmp_path: Path) -> None:
    plan = TrainingConfig(tmp_path / "disturbed", samples=300)
    outcome = interrupt_on_changing_ranks(plan, cycle([4, 2, 3]), random.Random(6))
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
    assert [(item.attempt, item.step) for item in select_lasting_steps(HISTORY)] == [(0, 1), (1, 2), (1, 3)]
    assert find_sample_problems(HISTORY, 3, 1) == []
    assert find_loss_problems(HISTORY, HISTORY[:3]) == []


def test_samples_seen_twice_or_never_are_told() -> None:
    wrong = [*HISTORY[:-1], replace(HISTORY[-1], samples=(0,))]
    assert find_sample_problems(wrong, 3, 1) == ["epoch 0: seen more than once: [0], never: [2]"]


def test_a_loss_or_a_batch_that_differs_is_told_and_so_is_what_was_not_done() -> None:
    for wrong in (replace(HISTORY[-1], loss="0x1.3p+0"), replace(HISTORY[-1], samples=(0,))):
        assert len(find_loss_problems([*HISTORY[:-1], wrong], HISTORY[:3])) == 1
    assert find_loss_problems(HISTORY[:2], HISTORY[:3]) == [
        "1 steps were never done, the first of them, by rank and step, (0, 3)"
    ]
    assert len(find_loss_problems(HISTORY, HISTORY[:2])) == 2
