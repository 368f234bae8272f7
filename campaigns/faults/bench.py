"""A run, made anew for each fault, what is done to it, and whether what then is there may be."""

from __future__ import annotations

import hashlib
import shutil
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

import holdfast
from campaigns.faults.cases import Fault, Setting, faults
from campaigns.faults.faulty import Faulty
from campaigns.kit import state, trial
from campaigns.kit.job import Rank
from campaigns.kit.state import ViolationError
from holdfast.errors import HoldfastError


@dataclass
class Tally:
    """What came of the faults of one setting."""

    calls: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


def tried(rank: Rank | None, scratch: Path, setting: Setting, every: int) -> Tally:
    """A rank's part: count the calls, and try every fault (or one in so many). Rank 0 judges."""
    del rank
    warnings.simplefilter("ignore")
    bench = _Bench(scratch, setting)
    calls = bench.count()
    tally = Tally(len(calls))
    for fault in list(faults(calls, setting))[::every]:
        _note(tally, str(fault), partial(bench.try_fault, fault))
    for number in range(5):
        _note(tally, f"signals {number}", bench.try_signals)
    return tally


def _note(tally: Tally, what: str, work: Callable[[], str]) -> None:
    try:
        tally.outcomes[work()] += 1
    except ViolationError as error:
        tally.violations.append(f"{what}: {error}")


@dataclass(frozen=True)
class _Said:
    """How a rank's call ended, the step that it loaded if it did, and how many files it has left open."""

    error: str = ""
    message: str = ""
    typed: bool = True
    step: int | None = None
    left_open: int = 0


class _Bench:
    """A run, made anew for each fault, and what is done to it."""

    def __init__(self, scratch: Path, setting: Setting) -> None:
        self._setting = setting
        self._rank = dist.get_rank()
        self._run, self._template = scratch / "run", scratch / "template"
        if self._rank == 0:
            scratch.mkdir(parents=True)
            self._run.mkdir()
        dist.barrier()
        trial.save(self._template, 1, "overwrite")
        if not setting.how:
            trial.save(self._template, 2, "new")
        dist.barrier()
        self._old = _digest(self._template)

    def count(self) -> list[str]:
        """The calls that the victim makes when nothing fails."""
        faulty = Faulty(self._run)
        self._attempt(faulty)
        told = [faulty.calls]
        dist.broadcast_object_list(told, self._setting.victim)
        return told[0]

    def try_fault(self, fault: Fault) -> str:
        """What came of a fault, in a word. Raises ``ViolationError``."""
        removed = fault.kind.removesuffix(" removed")
        gone = removed != fault.kind
        faulty = Faulty(self._run, fault.nth, partial(self._remove, removed) if gone else fault.kind, fault.forever)
        said = self._attempt(faulty)
        must = "done" if fault.kind == "short" else "raised" if fault.kind == "nothing" else ""
        return self._judge(said, must, untouched=not gone)

    def try_signals(self) -> str:
        """What comes of signals at every moment, in whose handlers Python goes on."""
        with _signals():
            said = self._attempt(None)
        return self._judge(said, "done", untouched=True)

    def _remove(self, what: str) -> None:
        found = {
            "run": [self._run],
            "draft": [self._run / name for name in (state.hidden(self._run) if self._run.exists() else [])],
            "checkpoint": [self._run / "step_2"],
            "file": [self._run / "step_2/model/model.safetensors"],
        }[what]
        for path in found:
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True) if path.is_file() else None

    def _attempt(self, faulty: Faulty | None) -> list[_Said]:
        """A save or load on a fresh run; what all ranks say of it."""
        if self._rank == 0:
            shutil.rmtree(self._run, ignore_errors=True)
            shutil.copytree(self._template, self._run)
        dist.barrier()
        self._checkpointer = trial.going_on(self._run)
        mine = self._rank == self._setting.victim and faulty is not None
        before = _descriptors()
        with faulty.there() if mine and faulty else nullcontext():
            said = self._outcome()
        said = replace(said, left_open=_descriptors() - before)
        every: list[Any] = [None] * self._setting.ranks
        dist.all_gather_object(every, said)
        return every

    def _outcome(self) -> _Said:
        try:
            if not self._setting.how:
                return _Said(step=trial.load(self._run))
            trial.save_with(self._checkpointer, 2, self._setting.how, background=self._setting.background)
        except Exception as error:  # noqa: BLE001 - judged by rank 0
            return _Said(type(error).__name__, str(error), isinstance(error, HoldfastError))
        return _Said()

    def _judge(self, said: list[_Said], must: str, *, untouched: bool) -> str:
        problem, word, latest = "", "", 0
        if self._rank == 0:
            try:
                word = self._look(said, must, untouched=untouched)
                latest = 2 if untouched and self._is_newest_there() else 1
            except ViolationError as error:
                problem = str(error)
        told: list[Any] = [problem, word, latest]
        dist.broadcast_object_list(told, 0)
        problem = told[0] or (self._before(told[2]) if untouched else "") or self._next()
        if problem:
            raise ViolationError(problem)
        return str(told[1])

    def _look(self, said: list[_Said], must: str, *, untouched: bool) -> str:
        """Whether what ranks say, and what is on the disk, may be; in a word what it was."""
        first = said[0]
        if len({(one.error, one.message, one.step) for one in said}) > 1 or not first.typed:
            raise ViolationError(f"ranks say {[(one.error, one.message, one.step) for one in said]}")
        if any(one.left_open > 0 for one in said):
            raise ViolationError(
                f"{[one.left_open for one in said]} files are left open, {first.error} {first.message}"
            )
        if must and (must == "raised") != bool(first.error):
            raise ViolationError(f"it must be {must}: {first.error} {first.message}")
        if untouched and first.error not in {"", "StorageError"}:
            raise ViolationError(f"no error of the disk: {first.error} {first.message}")
        if first.error == "StorageError" and str(self._run) not in first.message:
            raise ViolationError(f"the error names no path in the run: {first.message}")
        return self._look_at_save(first) if self._setting.how else _look_at_load(first, untouched=untouched)

    def _look_at_save(self, first: _Said) -> str:
        committed = self._is_newest_there()
        if not committed and not first.error and self._run.exists():
            raise ViolationError(f"no rank raised, and there is {state.visible(self._run)}")
        return f"{first.error}, though committed" if first.error and committed else first.error or "done"

    def _is_newest_there(self) -> bool:
        return self._run.exists() and 2 in state.visible(self._run).values()

    def _before(self, latest: int) -> str:
        """What was there before is there still, and loads, or what took its place does; what is wrong with it."""
        try:
            step = trial.load(self._run)
        except (HoldfastError, ViolationError) as error:
            return f"what is there cannot be loaded: {error!r}"
        if step != latest:
            return f"step {latest} is there, and a load gives step {step}"
        dist.barrier()
        there = _digest(self._run)
        dist.barrier()
        if (step == 1 or not self._setting.how) and {**there, **self._old} != there:
            return f"what was there before is not as it was: {sorted(there)}"
        return ""

    def _next(self) -> str:
        """The next save and load; what is wrong with them."""
        problem = ""
        try:
            if self._setting.how:
                trial.save_with(self._checkpointer, 3, "retention")
            elif self._run.exists() and holdfast.has_checkpoint(self._run):
                trial.load(self._run)
        except Exception as error:  # noqa: BLE001 - judged by the campaign
            problem = f"the next save or load failed: {error!r}"
        dist.barrier()
        if self._setting.how and not problem and (state.visible(self._run) != {"step_3": 3} or state.hidden(self._run)):
            problem = f"after the next save there are {state.visible(self._run)} and {state.hidden(self._run)}"
        dist.barrier()
        return problem


def _look_at_load(first: _Said, *, untouched: bool) -> str:
    """The newest checkpoint is loaded, or, where a part of it was removed meanwhile, the older one."""
    if first.error:
        return first.error
    if first.step != 2 and (untouched or first.step != 1):
        raise ViolationError(f"step {first.step} was loaded, not the newest")
    return "done" if first.step == 2 else "done, with the older one"


@contextmanager
def _signals() -> Iterator[None]:
    """A signal every half millisecond."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _digest(folder: Path) -> dict[str, str]:
    """Every visible file with a digest of its bytes."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file()) if folder.exists() else ()
    names = {str(path.relative_to(folder)): path for path in files}
    return {
        name: hashlib.blake2b(path.read_bytes()).hexdigest() for name, path in names.items() if not name.startswith(".")
    }
