"""One save or load of a job, in which something happens to a rank at a point, and checks of the other ranks."""

from __future__ import annotations

import random
import re
import shutil
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import rankless
from campaigns.common import state
from campaigns.common.job import STORES, Job, Rank, RankOutcome
from campaigns.common.points import LOAD_POINTS, SAVE_POINTS, Point, call_at_point
from campaigns.common.state import ViolationError
from rankless.engine.comm.vote import COORDINATOR_RANK

#: The ranks' timeout, and the time after it until which an error must come, in seconds.
TIMEOUT, SLACK = 3.0, 2.0

#: The seconds after which a job counts as hanging.
MAX_SECONDS = 90.0

#: The ways to save step 2 in addition to the checkpoint of step 1, or in its place.
SAVE_OPTIONS: dict[str, dict[str, Any]] = {
    "new": {},
    "overwrite": {"overwrite": True},
    "retention": {"keep": 1},
    "two renames": {"overwrite": True},
}

#: The hosts of three ranks: half of the jobs run on one host, the others on simulated hosts.
HOSTS = ("", "", "", "aab", "aba", "abc")


@dataclass(frozen=True)
class Case:
    """The point, the victim and the kind of save to try; a load if there is no ``save_kind``.

    ``hosts`` has a letter for the simulated host of each rank; it is empty if they share one.
    """

    point: Point
    victim: int
    size: int
    store: str
    save_kind: str = ""
    asynchronous: bool = False
    hosts: str = ""

    def __str__(self) -> str:
        call = (
            f"{self.save_kind} {'asynchronous' if self.asynchronous else 'synchronous'} save"
            if self.save_kind
            else "load"
        )
        hosts = f", hosts {self.hosts}" if self.hosts else ""
        return f"{self.point.name}: rank {self.victim} of {self.size}, {call}, store of {self.store}{hosts}"

    @property
    def backend(self) -> str:
        """The backend. For the point of a second group, one that moves CPU memory only over a group of its own."""
        return "cuda:gloo" if self.point.condition == "a second process group" else "gloo"


def generate_cases(points: Sequence[Point], *, saves: bool) -> Iterator[Case]:
    """Yield each point for each rank that reaches it, saves in both modes; the rest is chosen reproducibly."""
    draw = random.Random(0)
    for point in points:
        for victim in (0,) if point.rank_0_only else (0, 1, 2):
            for asynchronous in (False, True) if saves else (False,):
                if point.condition == "asynchronous" and not asynchronous:
                    continue
                save_kind = draw.choice(_list_save_kinds(point)) if saves else ""
                size, store, hosts = draw.choice([3, max(2, victim + 1)]), draw.choice(STORES), draw.choice(HOSTS)
                if point.condition == "several hosts":
                    size, hosts = 3, "aab"
                elif point.condition == "a second process group":
                    hosts = ""  # with several hosts the load before the save makes it
                yield Case(point, victim, size, store, save_kind, asynchronous, hosts[:size])


#: The kinds of saves that reach a point, by its ``condition``; by default all but the one with two renames.
_KINDS = {
    "no exchange of names": ["two renames"],
    "retention": ["retention"],
    "a new name": ["new", "retention"],
    "a name that is taken": ["overwrite"],
    "old checkpoints removed": ["overwrite", "retention"],
}


def _list_save_kinds(point: Point) -> list[str]:
    return _KINDS.get(point.condition, ["new", "overwrite", "retention"])


def select_cases(only: str) -> Iterator[tuple[str, int, Case]]:
    """Yield the cases whose points have ``only`` in their names, each with ``"save"`` or ``"load"`` and a number."""
    for call, points in (("save", SAVE_POINTS), ("load", LOAD_POINTS)):
        chosen = (case for case in generate_cases(points, saves=call == "save") if only in case.point.name)
        yield from ((call, number, case) for number, case in enumerate(chosen))


def find_unreached_points(cases: Iterable[tuple[str, Case, bool]]) -> list[str]:
    """Report points that no case has reached, because the code has changed."""
    reached: dict[str, bool] = {}
    for call, case, is_reached in cases:
        name = f"{call}: {case.point.name}"
        reached[name] = reached.get(name, False) or is_reached
    return [f"{name}: no case reached this point" for name, is_reached in reached.items() if not is_reached]


def save_step(path: Path, step: int, save_kind: str, *, asynchronous: bool = False, timeout: float = 60.0) -> None:
    """Save a step, and return when it is complete."""
    save_step_with(open_run(path, timeout), step, save_kind, asynchronous=asynchronous)


def open_run(path: Path, timeout: float = 60.0) -> rankless.RunDirectory:
    """Return a ``RunDirectory`` that continues the existing run, if any."""
    checkpointer = rankless.RunDirectory(path, timeout=timeout)
    if rankless.has_checkpoint(path):
        checkpointer.load()
    return checkpointer


def save_step_with(
    checkpointer: rankless.RunDirectory, step: int, save_kind: str, *, asynchronous: bool = False
) -> None:
    """Save a step with a ``RunDirectory`` that may have saved before."""
    tag = "last" if "overwrite" in SAVE_OPTIONS[save_kind] else f"step_{step}"
    with ExitStack() as stack:
        if save_kind == "two renames":
            stack.enter_context(mock.patch("rankless.storage.atomic_rename._renameat2", return_value=False))
        stack.enter_context(checkpointer)
        checkpointer.save(
            tag,
            state.build_shards(step),
            user_content=state.build_user_content(step),
            step=step,
            async_save=asynchronous,
            **SAVE_OPTIONS[save_kind],
        )


def load_latest(path: Path, timeout: float = 60.0) -> int:
    """Load the latest checkpoint and return its step. Raises ``ViolationError`` if it is not exact."""
    model = state.build_shards(0)
    restored = rankless.restore(path, model=model, share_reads="always", timeout=timeout)
    step = restored.user_content["step"]
    exact = state.has_values_of(model, step) and restored.user_content["history"] == list(range(step))
    if not exact or not torch.equal(restored.user_content["blob"], state.build_user_content(step)["blob"]):
        raise ViolationError(f"{restored.tag} in {path} is torn: it says step {step}, and holds something else")
    return int(step)


def _save_in_vain(checkpointer: rankless.RunDirectory, save_kind: str) -> None:
    """Let a save fail on all ranks, so that the next one knows the plan, and nothing else has changed."""
    broken = mock.patch("rankless.save.shard_writer.write_file_ranges", side_effect=OSError("broken"))
    with broken, suppress(rankless.RanklessError, OSError):
        save_step_with(checkpointer, 2, save_kind)


def save_or_load(rank: Rank, path: Path, case: Case, action: str) -> str:
    """Save step 2, or load, as one rank; ``action`` is what happens to the victim at the point."""
    state.build_shards(0)
    checkpointer = open_run(path, TIMEOUT) if case.save_kind else None
    if checkpointer is not None and case.point.condition == "a second save":
        _save_in_vain(checkpointer, case.save_kind)
    rank.wait_for_all_ranks()  # all ranks start together
    with ExitStack() as stack:
        if case.point.condition == "buckets of ranks":
            stack.enter_context(mock.patch("rankless.engine.integrity.crc_gather.MAX_FLAT_RANKS", 1))
        if dist.get_rank() == case.victim:
            stack.enter_context(call_at_point(case.point, getattr(rank, action)))
        if checkpointer is not None:
            save_step_with(checkpointer, 2, case.save_kind, asynchronous=case.asynchronous)
        else:
            load_latest(path, TIMEOUT)
        if dist.get_rank() == case.victim:
            for thread in threading.enumerate():
                if not thread.daemon and thread is not threading.current_thread():
                    thread.join()  # the last point is after the handle's result
    return "done"


def start_job(case: Case, scratch: Path, path: Path, action: str) -> Job:
    """Start the ranks of a case, each with :func:`save_or_load`."""
    return Job(case.size, case.store, scratch, save_or_load, path, case, action, backend=case.backend, hosts=case.hosts)


def resume_and_save(rank: Rank, path: Path) -> int:
    """Load, save the next step and load that, as one rank of the job that continues. Return the first step."""
    del rank
    step = load_latest(path)
    save_step(path, step + 1, "retention")
    if load_latest(path) != step + 1:
        raise ViolationError(f"what was saved last in {path} is not the latest")
    return step


def create_run(template: Path, path: Path) -> Path:
    """Create a run whose only checkpoint is of step 1."""
    if not template.exists():
        save_step(template, 1, "overwrite")
    shutil.copytree(template, path)
    return path


def check_survivors(job: Job, case: Case, since: float) -> tuple[float, list[RankOutcome]]:
    """Raise ``ViolationError`` unless all other ranks ended as promised. Return the seconds of the slowest."""
    ends = [end for rank, end in sorted(job.outcomes.items()) if rank != case.victim]
    if len(ends) != case.size - 1:
        raise ViolationError(f"{case}: only {len(ends)} of {case.size - 1} others ended: the rest hang")
    seconds = max(end.time - since for end in ends)
    for end in ends:
        if end.error and not (end.is_typed and names_rank(end.message, case.victim)):
            raise ViolationError(f"{case}: {end.error} does not name the rank: {end.message}")
    if not case.save_kind and not case.point.may_be_committed and any(not end.error for end in ends):
        raise ViolationError(f"{case}: some rank loaded, and some did not: {[end.message for end in ends]}")
    if not is_same_error(ends, case.victim):
        raise ViolationError(f"{case}: not one error: {[(end.error, end.message) for end in ends]}")
    if seconds > TIMEOUT + SLACK:
        raise ViolationError(f"{case}: the others waited {seconds:.1f} s: {[end.message for end in ends]}")
    return seconds, ends


def is_same_error(ends: Sequence[RankOutcome], victim: int) -> bool:
    """Return whether the other ranks raised what all of them must raise.

    While rank 0 lives, it decides for all: one type with one message, or no error. Without it, each rank finds out by
    itself: one type, but messages differ in the phase and in the lost connection, and a rank that learned the result
    before raises nothing.
    """
    if victim == COORDINATOR_RANK:
        return len({end.error for end in ends if end.error}) <= 1
    return len({(end.error, end.message) for end in ends}) <= 1


def describe_missed_point(job: Job, case: Case) -> str:
    """Return the violation if a rank never reached its point, unless it has no work there."""
    if len(job.outcomes) != case.size:
        return f"{case}: hangs before the point"
    errors = [f"{end.error}: {end.message}" for end in job.outcomes.values() if end.error]
    return f"{case}: failed before the point: {errors}" if errors else ""


def names_rank(message: str, rank: int) -> bool:
    """Return whether a message names a rank, or the store that may be in its process."""
    listed = re.findall(r"\branks? ([\d, ]+)", message)
    return any(str(rank) in re.findall(r"\d+", numbers) for numbers in listed)


def check_checkpoints(path: Path, case: Case, ends: Sequence[RankOutcome], *, woken: bool = False) -> bool:
    """Raise ``ViolationError`` unless visible checkpoints are old or new. Return whether the save is committed.

    Rank 0 may still commit when it is ``woken``: all other ranks had done their part.
    """
    checkpoints = state.read_checkpoints(path)
    tag = "last" if "overwrite" in SAVE_OPTIONS[case.save_kind] else "step_2"
    committed = checkpoints.get(tag) == 2
    others = {name: step for name, step in checkpoints.items() if not (committed and name == tag)}
    may_go = committed and case.save_kind == "retention"
    may_be_aside = case.point.condition == "no exchange of names"
    if others != {"last": 1} and not (others == {} and ((tag == "last" and (committed or may_be_aside)) or may_go)):
        raise ViolationError(f"{case}: what is visible is {checkpoints}")
    if committed and not case.point.may_be_committed and not (woken and case.victim == 0):
        raise ViolationError(f"{case}: committed without a rank that has not written or reported")
    if not committed and any(not end.error for end in ends):
        raise ViolationError(f"{case}: some rank was told that it is saved, and it is not")
    return committed
