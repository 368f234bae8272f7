"""Tests of when a training is saved: by steps, by time, or by what saves and failures cost."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import rankless
from rankless.errors import InvalidArgumentError
from rankless.run.journal import JournalEntry
from rankless.save import cadence
from rankless.save.cadence import ByCost, CostOfSaves, EveryInterval, best_interval, count_failures
from tests.helpers.pool import Ranks


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def train(steps: list[float], seconds: float) -> tuple[list[float], int]:
    """Return when a training with steps of these lengths is saved, and how often its ranks have met for that."""
    clock, meetings, saved = Clock(), 0, []
    timed = EveryInterval(lambda: seconds, clock)

    def ask(decide: Any) -> bytes:
        nonlocal meetings
        meetings += 1
        return bytes(decide())

    for number, length in enumerate(steps, 1):
        clock.now += length
        if timed.is_due(number, ask):
            saved.append(clock.now)
            timed.restart()
    return saved, meetings


@given(st.floats(0.01, 20), st.floats(20, 2000))
def test_so_much_time_is_between_two_saves_as_whole_steps_allow(step: float, seconds: float) -> None:
    saved, meetings = train([step] * min(int(5 * seconds / step) + 5, 20_000), seconds)
    for before, after in zip([0.0, *saved], saved, strict=False):
        assert abs(after - before - seconds) <= step / 2 + 1e-6
    assert meetings <= (len(saved) + 1) * (max(seconds / 2.5, seconds / step / 50) + 45)


def test_a_training_that_becomes_slower_is_noticed() -> None:
    """Half of the steps that the remaining time seems to have take as long, at most."""
    saved, _ = train([0.1] * 3000 + [2.0] * 2000, 600)
    assert saved[0] <= 600 + 100  # the steps until the next meeting were 5 s long before
    assert all(after - before == pytest.approx(600, abs=3) for before, after in pairwise(saved))


def test_other_steps_send_nothing() -> None:
    _, meetings = train([0.2] * 3000, 600)
    assert meetings < 150
    _, meetings = train([0.01] * 60_000, 600)
    assert meetings < 60_000 / 50 + 50


def journal(failures: list[float]) -> list[JournalEntry]:
    """A run that was saved each hour, and resumed after each of these hours of training."""
    entries, hours = [], 0.0
    for length in failures:
        entries += [JournalEntry("saved", (hours + hour) * 3600, "s") for hour in range(int(length) + 1)]
        hours += length + 100  # the job waits in a queue
        entries.append(JournalEntry("resumed", hours * 3600, "s"))
    return entries


def test_time_in_a_queue_is_no_training() -> None:
    assert count_failures(journal([5, 3, 8])) == (16 * 3600, 3)


def lose_time(interval: Iterator[float], cost: float, failures: list[float], work: float) -> float:
    """Return how long so much work takes, if a save costs ``cost`` and the job fails after each of ``failures``."""
    total = done = 0.0
    for until_failure in failures:
        spent, every = 0.0, next(interval)
        while spent + every + cost <= until_failure:
            spent += every + cost
            done += every
            if done >= work:
                return total + spent
        total += until_failure  # what was not saved is lost
    raise AssertionError("too few failures were drawn")


@pytest.mark.parametrize("cost", [0.2, 5.0, 60.0])
@pytest.mark.parametrize("hours_per_failure", [2.0, 12.0, 72.0])
def test_the_computed_interval_loses_at_most_5_percent_against_the_best_fixed_one(
    cost: float, hours_per_failure: float
) -> None:
    drawn = random.Random(0)
    failures = [drawn.expovariate(1 / (hours_per_failure * 3600)) for _ in range(4000)]
    work = 300 * hours_per_failure * 3600

    def computed() -> Iterator[float]:
        seconds = 0.0
        for count, length in enumerate(failures):
            yield best_interval(cost, (cadence._ASSUMED_SECONDS_PER_FAILURE + seconds) / (1 + count))
            seconds += length

    fixed = [
        lose_time(iter([every] * len(failures)), cost, failures, work)
        for every in (10.0 * 1.25**exponent for exponent in range(40))
        if every + cost < 4 * hours_per_failure * 3600
    ]
    assert lose_time(computed(), cost, failures, work) <= 1.05 * min(fixed)


def test_the_interval_follows_what_saves_cost(tmp_path: Path) -> None:
    clock = Clock()
    costs = CostOfSaves(tmp_path, clock)
    timed = ByCost(costs, clock)
    assert costs.find_seconds() == 120  # the first one is early: then the cost is known
    timed.restart(2.0)
    assert costs.find_seconds() == pytest.approx((2 * 2 * 86400) ** 0.5)
    for _ in range(50):
        timed.restart(60.0)
    assert costs.find_seconds() == pytest.approx((2 * 60 * 86400) ** 0.5, rel=0.01)
    for _ in range(50):
        timed.restart(4000.0)
    assert costs.find_seconds() == pytest.approx(80_000, rel=0.01)  # saves take 5 % of the time, and no more


def test_a_computed_interval_is_logged_if_it_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rankless")
    costs = CostOfSaves(tmp_path, Clock())
    costs.find_seconds()
    for cost in (2.0, 2.0, 2.1, 60.0):
        costs.note(cost)
        costs.find_seconds()
    assert [record.getMessage() for record in caplog.records] == [
        "saves a checkpoint every 587.88 s: a save costs 2.00 s",
        "saves a checkpoint every 1831.92 s: a save costs 19.42 s",
    ]


@pytest.mark.parametrize(("interval", "fast", "slow"), [(60, 0.001, 10.0), (300, 0.001, 1.0), (60, 0.01, 2.0)])
def test_steps_that_become_slow_are_noticed(interval: float, fast: float, slow: float) -> None:
    clock = Clock()
    timed, saves = EveryInterval(lambda: interval, clock), [0.0]
    for step in range(1, 6000):
        clock.now += fast if step <= 5000 else slow
        if timed.is_due(step, lambda decide: decide()):
            saves.append(clock.now)
            timed.restart()
    gaps = [after - before for before, after in pairwise(saves)]
    assert max(gaps) <= interval + 50 * slow
    assert max(gaps[2:]) <= interval + slow


def test_a_run_that_is_often_resumed_is_saved_more_often(tmp_path: Path) -> None:
    costs = CostOfSaves(tmp_path, Clock())
    costs.note(2.0)
    with mock.patch.object(cadence, "read_journal", return_value=journal([1] * 47)):
        assert costs.find_seconds() == pytest.approx((2 * 2 * (86400 + 47 * 3600) / 48) ** 0.5)


@pytest.mark.parametrize("save_every", [timedelta(0), timedelta(seconds=-1), 0, -3, 1.5, True, "often"])
def test_what_is_no_interval_is_refused(tmp_path: Path, save_every: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="save_every must be"):
        rankless.Checkpointer(tmp_path, save_every=save_every)


def test_a_training_is_saved_by_the_clock(tmp_path: Path) -> None:
    model, clock = torch.nn.Linear(2, 2), Clock()
    with (
        mock.patch.object(cadence.EveryInterval.__init__, "__defaults__", (clock,)),
        rankless.Checkpointer(tmp_path, model=model, save_every=timedelta(minutes=1), signals=()) as checkpointer,
    ):
        for step in range(checkpointer.resume() + 1, 31):
            clock.now += 10
            checkpointer.step(step)
            if step == 8:
                checkpointer.save("by hand")  # the next minute begins here
    assert [info.tag for info in rankless.list_checkpoints(tmp_path)] == [
        "step_6",
        "by hand",
        "step_14",
        "step_20",
        "step_26",
        "step_30",
    ]


def _save_by_the_clock_of_rank_0(path: str) -> list[str]:
    model, rank = torch.nn.Linear(2, 2), dist.get_rank()
    with rankless.Checkpointer(path, model=model, save_every=timedelta(seconds=0.25), signals=()) as checkpointer:
        for step in range(checkpointer.resume() + 1, 41):
            time.sleep(0.02 if rank else 0.01 + 0.02 * (step % 2))  # ranks are not at one step at one time
            checkpointer.step(step)
    return [info.tag for info in rankless.list_checkpoints(path)]


def test_all_ranks_save_the_same_steps(ranks: Ranks, tmp_path: Path) -> None:
    first, *others = ranks(3, _save_by_the_clock_of_rank_0, str(tmp_path))
    assert others == [first, first]
    assert 2 <= len(first) <= 12


def _save_at_other_times(path: str) -> str:
    every = timedelta(minutes=1 + dist.get_rank())
    checkpointer = rankless.Checkpointer(path, model=torch.nn.Linear(2, 2), save_every=every, signals=())
    with pytest.raises(rankless.RankMismatchError) as caught:
        checkpointer.resume()
    return str(caught.value)


def test_ranks_that_pass_other_times_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    assert all("save_every" in message for message in ranks(2, _save_at_other_times, str(tmp_path)))


def test_what_waits_for_the_save_before_is_a_cost_of_saves(tmp_path: Path) -> None:
    with rankless.Checkpointer(tmp_path, model=torch.nn.Linear(2, 2), save_every="auto", signals=()) as checkpointer:
        checkpointer.resume()
        checkpointer.step(1)
        with mock.patch.object(rankless.RunDirectory, "wait_for_turn", side_effect=partial(time.sleep, 0.5)):
            checkpointer.save()
        assert checkpointer._cadence._costs._cost >= 0.5  # type: ignore[attr-defined]


def test_a_wrong_clock_in_the_journal_makes_no_interval_of_days() -> None:
    entries = [JournalEntry(kind="saved", time=at, tag="s") for at in (200e6, 1.7e9, 1.7e9 + 60)]
    seconds, failures = count_failures(entries)
    assert (seconds, failures) == (86460, 0)
    assert best_interval(2.0, 1e9) == 4 * 3600
    assert best_interval(3600.0, 1e9) == 20 * 3600  # else saves would take more than 5 %


@pytest.mark.parametrize("save_every", ["Auto", "10min", 600.0])
def test_what_is_no_interval_is_refused_with_what_is_one(tmp_path: Path, save_every: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"a number of steps, a datetime.timedelta or 'auto'"):
        rankless.Checkpointer(tmp_path, model=torch.nn.Linear(2, 2), save_every=save_every)
