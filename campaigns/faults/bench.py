"""A test bench that creates a fresh run for each fault, injects the fault, and judges the outcome."""

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
    """The outcomes of the faults of one setting."""

    calls: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


def tried(rank: Rank | None, scratch: Path, setting: Setting, every: int) -> Tally:
    """Count the calls, and try every fault (or every n-th), as one rank of the job. Rank 0 judges."""
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
    """The outcome on one rank: its error, the step that it loaded, and the number of files that it left open."""

    error: str = ""
    message: str = ""
    typed: bool = True
    step: int | None = None
    left_open: int = 0


class _Bench:
    """A run that is created anew for each fault, and the save or load to disturb."""

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
        """Count the calls that the victim makes without a fault."""
        faulty = Faulty(self._run)
        self._attempt(faulty)
        told = [faulty.calls]
        dist.broadcast_object_list(told, self._setting.victim)
        return told[0]

    def try_fault(self, fault: Fault) -> str:
        """Inject a fault. Return the outcome in a word. Raises ``ViolationError``."""
        removed = fault.kind.removesuffix(" removed")
        gone = removed != fault.kind
        faulty = Faulty(self._run, fault.nth, partial(self._remove, removed) if gone else fault.kind, fault.forever)
        said = self._attempt(faulty)
        must = "done" if fault.kind == "short" else "raised" if fault.kind == "nothing" else ""
        return self._judge(said, must, untouched=not gone)

    def try_signals(self) -> str:
        """Send signals at every moment, after whose handlers Python continues. Return the outcome in a word."""
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
        """Save or load with a fresh run. Return the outcomes of all ranks."""
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
        """Return the outcome in a word. Raises ``ViolationError`` if the ranks' reports or the disk are not allowed."""
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
        """Check that the earlier checkpoint, or its replacement, is there and loads. Return the problem, if any."""
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
        """Save and load again. Return the problem, if any."""
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
    """Check that the newest checkpoint was loaded; the older one only if a part of the newest was removed."""
    if first.error:
        return first.error
    if first.step != 2 and (untouched or first.step != 1):
        raise ViolationError(f"step {first.step} was loaded, not the newest")
    return "done" if first.step == 2 else "done, with the older one"


@contextmanager
def _signals() -> Iterator[None]:
    """Send a signal every half millisecond."""
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
    """Return every visible file with a digest of its bytes."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file()) if folder.exists() else ()
    names = {str(path.relative_to(folder)): path for path in files}
    return {
        name: hashlib.blake2b(path.read_bytes()).hexdigest() for name, path in names.items() if not name.startswith(".")
    }
