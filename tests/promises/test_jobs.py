"""Promises about several jobs and processes at a time, and about how a process ends."""

from __future__ import annotations

import errno
import itertools
import shutil
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import rankless
from rankless.errors import RanklessError, StorageError
from tests.promises.jobs import NO_RUN, job, latest_step, listed, train
from tests.promises.moments import at_change, at_each_change, count_changes, draw_moments
from tests.promises.places import (
    FORK,
    NEW_ONLY,
    PLACES,
    Drain,
    Place,
    Run,
    bucket_of,
    in_killed_job,
    in_new_job,
    state_of,
    weights_of,
)
from tests.promises.promise import because, promise

_NO_WRITER = because("what is saved at a time are generations of a tier", "drain of an earlier job", "`rankless drain`")


def try_to_save(place: Place, tag: str, value: float) -> None:
    with suppress(RanklessError):
        place.save(tag, value, overwrite=True)


def save_and_stop(place: Place, tag: str, number: int) -> None:
    """Save a value, and let another job save another one before a change."""
    with at_change(number, lambda: in_killed_job(try_to_save, in_new_job(place), tag, 1.0)):
        try_to_save(place, tag, 2.0)


@promise("two saves at a time under one name leave one of both, whole", exempt=_NO_WRITER, in_one_process=True)
def test_two_saves_under_one_name(place: Place) -> None:
    place.save("first", 0.0)
    changes = count_changes(lambda: place.save("second", 0.0))
    for number in draw_moments(changes, 1, place):
        in_killed_job(save_and_stop, in_new_job(place), f"tag_{number}", number)
        assert place.load(f"tag_{number}") in {1.0, 2.0}, number


def train_and_stop(place: Place, number: int) -> None:
    """Resume, and save one step; meanwhile another job resumes and saves three."""
    with job(place) as directory:
        state = state_of(0.0)
        first = int(directory.restore(None, state, resume=True).step or 0)
        state["w"].copy_(weights_of(first + 1))
        with at_change(number, lambda: in_killed_job(train, in_new_job(place), first + 3)), suppress(RanklessError):
            directory.save(f"step_{first + 1}", state, step=first + 1)
            directory.finalize()


@promise("a job that wakes up after another one has continued does no harm, whenever it was stopped", exempt=NO_RUN)
def test_jobs_that_wake_up(place: Place) -> None:
    place.save("step_1", 1.0)
    changes = count_changes(lambda: train(place, 2)) // 2
    for number in draw_moments(changes, 2, place):
        first = train(place, 0)
        with suppress(RanklessError):
            in_killed_job(train_and_stop, in_new_job(place), number)
            assert place.load(f"step_{first + 2}") == first + 2


def save_late(place: Place) -> None:
    """Resume, and save a step after another job has resumed and gone on. What is there is replaced."""
    with job(place) as directory:
        state = state_of(0.0)
        first = int(directory.restore(None, state, resume=True).step or 0)
        in_killed_job(train, in_new_job(place), first + 3)
        state["w"].copy_(weights_of(first - 1))
        with suppress(RanklessError):
            directory.save(f"step_{first + 1}", state, overwrite=True, step=first - 1)
            directory.finalize()


@promise(
    "a job that another one has continued replaces nothing of it",
    exempt=NO_RUN,
)
def test_older_jobs(place: Place) -> None:
    place.save("step_1", 1.0)
    in_killed_job(save_late, in_new_job(place))
    assert latest_step(place) == 4
    assert place.load("step_2") == 2.0


def read_old_or_new(place: Place) -> None:
    assert place.load("one") in {1.0, 2.0}


@promise(
    "a reader finds the old output or the new one, whole, at any moment of a save",
    exempt=because("only new paths are written", *NEW_ONLY),
    in_one_process=True,
)
def test_readers_at_any_moment(place: Place) -> None:
    place.save("one", 1.0)
    changes = count_changes(lambda: place.save("one", 1.0, overwrite=True))
    for value, number in zip(itertools.cycle((2.0, 1.0)), draw_moments(changes, 2, place), strict=False):
        with at_change(number, lambda: in_killed_job(read_old_or_new, in_new_job(place))):
            place.save("one", value, overwrite=True)


class SlowCopy:
    """A copy of a run by a program that lists it, copies half of the files or objects, and is at the others later."""

    def __init__(self, run: Any, name: str) -> None:
        self._run, self._listed = run, [""]
        self.place = in_new_job(run)
        self.place.path = run.path.with_name(name)  # type: ignore[attr-defined]
        if run.local is not None:
            self.place.local = run.local.with_name(f"tier of {name}")  # type: ignore[attr-defined]

    def begin(self) -> None:
        self._listed = sorted(self._read())
        self._copy(self._listed[::2])

    def end(self) -> None:
        self._copy(self._listed[1::2])

    def _read(self) -> dict[str, Any]:
        """Return the files or objects of the run by their names in it."""
        if (bucket := bucket_of(self._run)) is not None:
            return {key.removeprefix("run/"): bucket.objects[key] for key in bucket.objects if key.startswith("run/")}
        files = self._run.path.rglob("*")
        return {str(file.relative_to(self._run.path)): file for file in files if file.is_file()}

    def _copy(self, names: list[str]) -> None:
        bucket, found = bucket_of(self._run), self._read()
        for name in found.keys() & names:
            target = self.place.path / name  # type: ignore[attr-defined]
            if bucket is not None:
                bucket.objects[f"{self.place.path.name}/{name}"] = replace(found[name])  # type: ignore[attr-defined]
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(found[name], target)


def go_on_in_copy(copied: Place, step: int) -> None:
    """Check that a job goes on from a step or the one before, saves all later ones, and finds them again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert train(copied, step + 2) in {step - 1, step}
    assert latest_step(copied) == step + 2
    assert {f"step_{number}" for number in range(1, step + 3)} <= {*listed(copied)}


@promise(
    "a copy of a run that began during a save goes on from the old checkpoint or the new one",
    exempt=NO_RUN,
    in_one_process=True,
)
def test_copies_during_a_save(place: Place) -> None:
    place.save("step_1", 1.0)
    changes = count_changes(lambda: place.save("step_2", 2.0))
    for step, number in enumerate(draw_moments(changes, 2, place)[::4], start=3):  # each takes a job
        copying = SlowCopy(place, f"copy_{step}")
        with at_change(number, copying.begin):
            place.save(f"step_{step}", float(step))
        copying.end()
        in_killed_job(go_on_in_copy, copying.place, step)


def end_as_worker() -> None:
    rankless.finalize()


@promise("a process that is forked at any moment of a save, and ends, leaves the save alone", in_one_process=True)
def test_forks(place: Place) -> None:
    place.save("one", 1.0)
    moments = draw_moments(count_changes(lambda: place.save("two", 1.0)), 2, place)
    passed = -1

    def fork() -> None:
        nonlocal passed
        passed += 1
        if passed in moments:
            worker = FORK.Process(target=end_as_worker)
            worker.start()
            worker.join(30)
            assert worker.exitcode == 0

    with at_each_change(fork):
        place.save("three", 3.0)
    assert passed >= min(moments)
    assert [place.load(tag) for tag in ("one", "two", "three")] == [1.0, 1.0, 3.0]


@promise(
    "a process that is forked from one that has saved saves into the same place, and both go on", in_one_process=True
)
def test_a_forked_process_saves(place: Place) -> None:
    place.save("step_1", 1.0)
    in_killed_job(place.save, "step_2", 2.0)
    place.save("step_3", 3.0)
    assert [place.load(f"step_{step}") for step in (1, 2, 3)] == [1.0, 2.0, 3.0]
    if isinstance(place, Run | Drain):
        assert listed(place) == ["step_1", "step_2", "step_3"]


@promise("two objects of one process save into one place in turn", in_one_process=True)
def test_two_objects(place: Place) -> None:
    other = in_new_job(place)
    for step in (1, 3):
        place.save(f"step_{step}", float(step))
        other.save(f"step_{step + 1}", float(step + 1))
    assert [place.load(f"step_{step}") for step in (1, 2, 3, 4)] == [1.0, 2.0, 3.0, 4.0]
    if isinstance(place, Run | Drain):
        assert listed(place) == ["step_1", "step_2", "step_3", "step_4"]


#: The places that can be saved into in the background.
_BACKGROUND = ("folder", "folder and tier", "store", "store and tier")
_COMPONENTS = ("component in a folder", "component in a file", "component in a store")
_WAITS = because(
    "the call of a save returns when it is durable",
    *(name for name in PLACES if name not in {*_BACKGROUND, *_COMPONENTS}),
)


def end_during_a_save(place: Any, call: Callable[[], None]) -> int | None:
    """Return the exit status of a process that begins a save in the background and ends."""
    patch = at_each_change(lambda: call_in_background(call))

    def begin() -> None:
        patch.__enter__()  # until the process has ended
        place.start_saving("one", 1.0)

    process = FORK.Process(target=begin)
    process.start()
    process.join(60)
    return process.exitcode


def call_in_background(call: Callable[[], None]) -> None:
    if threading.current_thread() is not threading.main_thread():
        call()


@promise("a process that ends during a save in the background ends it first", exempt=_WAITS, in_one_process=True)
def test_ends_during_a_save(place: Place) -> None:
    assert end_during_a_save(place, lambda: time.sleep(0.002)) == 0
    assert place.load("one") == 1.0


def fail() -> None:
    raise StorageError(errno.ENOSPC, "no space left on device")


@promise("a save that fails without a wait for it is the exit status", exempt=_WAITS, in_one_process=True)
def test_exit_status(place: Place) -> None:
    assert end_during_a_save(place, fail) not in {0, None}
    place.save("one", 2.0)
    assert place.load("one") == 2.0
