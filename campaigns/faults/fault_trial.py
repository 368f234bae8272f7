"""Trials of faults: each creates a fresh run, injects a fault, and checks the outcome."""

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

import rankless
from campaigns.common import interruption, state
from campaigns.common.job import Rank
from campaigns.common.state import ViolationError
from campaigns.faults.cases import Fault, FaultyCall, generate_faults
from campaigns.faults.faulty_file_system import FaultyFileSystem
from rankless.errors import RanklessError


@dataclass
class Tally:
    """The outcomes of the faults of one save or load."""

    calls: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


def try_all_faults(rank: Rank | None, scratch: Path, faulty_call: FaultyCall, every: int) -> Tally:
    """Count the calls, and try every fault (or every n-th), as one rank of the job. Rank 0 checks the outcomes."""
    del rank
    warnings.simplefilter("ignore")
    trial = _FaultTrial(scratch, faulty_call)
    calls = trial.count_calls()
    tally = Tally(len(calls))
    for fault in list(generate_faults(calls, faulty_call))[::every]:
        _count_outcome(tally, str(fault), partial(trial.try_fault, fault))
    for number in range(5):
        _count_outcome(tally, f"signals {number}", trial.try_signals)
    return tally


def _count_outcome(tally: Tally, name: str, work: Callable[[], str]) -> None:
    try:
        tally.outcomes[work()] += 1
    except ViolationError as error:
        tally.violations.append(f"{name}: {error}")


@dataclass(frozen=True)
class _RankReport:
    """The outcome on one rank: its error, the step that it loaded, and the number of files that it left open.

    ``injected``: a call of this rank had the fault.
    """

    error: str = ""
    message: str = ""
    is_typed: bool = True
    step: int | None = None
    left_open: int = 0
    injected: bool = False


class _FaultTrial:
    """A run that is created anew for each fault, and the save or load to disturb."""

    def __init__(self, scratch: Path, faulty_call: FaultyCall) -> None:
        self._faulty_call = faulty_call
        self._rank = dist.get_rank()
        self._run, self._template = scratch / "run", scratch / "template"
        if self._rank == 0:
            scratch.mkdir(parents=True)
            self._run.mkdir()
        dist.barrier()
        interruption.save_step(self._template, 1, "overwrite")
        if not faulty_call.save_kind:
            interruption.save_step(self._template, 2, "new")
        dist.barrier()
        self._old = _digest_files(self._template)

    def count_calls(self) -> list[str]:
        """Count the calls that the victim makes without a fault."""
        faulty = FaultyFileSystem(self._run)
        self._run_call(faulty)
        message = [faulty.calls]
        dist.broadcast_object_list(message, self._faulty_call.victim)
        return message[0]

    def try_fault(self, fault: Fault) -> str:
        """Inject a fault. Return the outcome in a word. Raises ``ViolationError``."""
        removed = fault.kind.removesuffix(" removed")
        is_removal = removed != fault.kind
        faulty = FaultyFileSystem(
            self._run, fault.nth, partial(self._remove_path, removed) if is_removal else fault.kind, fault.forever
        )
        reports = self._run_call(faulty)
        # Without a fault other calls were made: fewer, because of another order of threads.
        must_succeed = fault.kind == "short" or not any(report.injected for report in reports)
        return self._check_outcome(reports, must_succeed=must_succeed, untouched=not is_removal)

    def try_signals(self) -> str:
        """Send signals at every moment, after whose handlers Python continues. Return the outcome in a word."""
        with _send_signals():
            reports = self._run_call(None)
        return self._check_outcome(reports, must_succeed=True, untouched=True)

    def _remove_path(self, kind: str) -> None:
        paths = {
            "run": [self._run],
            "pending directory": [
                self._run / name for name in (state.list_hidden_names(self._run) if self._run.exists() else [])
            ],
            "checkpoint": [self._run / "step_2"],
            "file": [self._run / "step_2/model/model.safetensors"],
        }[kind]
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True) if path.is_file() else None

    def _run_call(self, faulty: FaultyFileSystem | None) -> list[_RankReport]:
        """Save or load with a fresh run. Return the outcomes of all ranks."""
        if self._rank == 0:
            shutil.rmtree(self._run, ignore_errors=True)
            shutil.copytree(self._template, self._run)
        dist.barrier()
        self._checkpointer = interruption.open_run(self._run)
        is_victim = self._rank == self._faulty_call.victim and faulty is not None
        before = _count_open_files()
        with faulty.install() if is_victim and faulty else nullcontext():
            report = self._run_and_catch()
        injected = is_victim and faulty is not None and faulty.injected
        report = replace(report, left_open=_count_open_files() - before, injected=injected)
        reports: list[Any] = [None] * self._faulty_call.ranks
        dist.all_gather_object(reports, report)
        return reports

    def _run_and_catch(self) -> _RankReport:
        try:
            if not self._faulty_call.save_kind:
                return _RankReport(step=interruption.load_latest(self._run))
            interruption.save_step_with(
                self._checkpointer, 2, self._faulty_call.save_kind, asynchronous=self._faulty_call.asynchronous
            )
        except Exception as error:  # noqa: BLE001 - rank 0 checks it
            return _RankReport(type(error).__name__, str(error), isinstance(error, RanklessError))
        return _RankReport()

    def _check_outcome(self, reports: list[_RankReport], *, must_succeed: bool, untouched: bool) -> str:
        problem, outcome, latest = "", "", 0
        if self._rank == 0:
            try:
                outcome = self._check_reports(reports, must_succeed=must_succeed, untouched=untouched)
                latest = 2 if untouched and self._has_newest() else 1
            except ViolationError as error:
                problem = str(error)
        message: list[Any] = [problem, outcome, latest]
        dist.broadcast_object_list(message, 0)
        problem = message[0] or (self._check_earlier(message[2]) if untouched else "") or self._check_next_call()
        if problem:
            raise ViolationError(problem)
        return str(message[1])

    def _check_reports(self, reports: list[_RankReport], *, must_succeed: bool, untouched: bool) -> str:
        """Return the outcome in a word. Raises ``ViolationError`` if the ranks' reports or the disk are not allowed."""
        first = reports[0]
        if len({(report.error, report.message, report.step) for report in reports}) > 1 or not first.is_typed:
            raise ViolationError(f"ranks say {[(report.error, report.message, report.step) for report in reports]}")
        if any(report.left_open > 0 for report in reports):
            raise ViolationError(
                f"{[report.left_open for report in reports]} files are left open, {first.error} {first.message}"
            )
        if must_succeed and first.error:
            raise ViolationError(f"it must succeed: {first.error} {first.message}")
        if untouched and first.error not in {"", "StorageError"}:
            raise ViolationError(f"no error of the disk: {first.error} {first.message}")
        if first.error == "StorageError" and str(self._run) not in first.message:
            raise ViolationError(f"the error names no path in the run: {first.message}")
        return self._check_save(first) if self._faulty_call.save_kind else _check_load(first, untouched=untouched)

    def _check_save(self, first: _RankReport) -> str:
        committed = self._has_newest()
        if not committed and not first.error and self._run.exists():
            raise ViolationError(f"no rank raised, and there is {state.read_checkpoints(self._run)}")
        return f"{first.error}, though committed" if first.error and committed else first.error or "done"

    def _has_newest(self) -> bool:
        return self._run.exists() and 2 in state.read_checkpoints(self._run).values()

    def _check_earlier(self, latest: int) -> str:
        """Check that the earlier checkpoint, or its replacement, is there and loads. Return the problem, if any."""
        try:
            step = interruption.load_latest(self._run)
        except (RanklessError, ViolationError) as error:
            return f"what is there cannot be loaded: {error!r}"
        if step != latest:
            return f"step {latest} is there, and a load gives step {step}"
        dist.barrier()
        digests = _digest_files(self._run)
        dist.barrier()
        if (step == 1 or not self._faulty_call.save_kind) and {**digests, **self._old} != digests:
            return f"what was there before is not as it was: {sorted(digests)}"
        return ""

    def _check_next_call(self) -> str:
        """Save and load again. Return the problem, if any."""
        problem = ""
        try:
            if self._faulty_call.save_kind:
                interruption.save_step_with(self._checkpointer, 3, "retention")
            elif self._run.exists() and rankless.has_checkpoint(self._run):
                interruption.load_latest(self._run)
        except Exception as error:  # noqa: BLE001 - the campaign reports it
            problem = f"the next save or load failed: {error!r}"
        dist.barrier()
        if (
            self._faulty_call.save_kind
            and not problem
            and (state.read_checkpoints(self._run) != {"step_3": 3} or state.list_hidden_names(self._run))
        ):
            names = state.list_hidden_names(self._run)
            problem = f"after the next save there are {state.read_checkpoints(self._run)} and {names}"
        dist.barrier()
        return problem


def _check_load(first: _RankReport, *, untouched: bool) -> str:
    """Check that the newest checkpoint was loaded; the older one only if a part of the newest was removed."""
    if first.error:
        return first.error
    if first.step != 2 and (untouched or first.step != 1):
        raise ViolationError(f"step {first.step} was loaded, not the newest")
    return "done" if first.step == 2 else "done, with the older one"


@contextmanager
def _send_signals() -> Iterator[None]:
    """Send a signal every half millisecond."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _count_open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _digest_files(folder: Path) -> dict[str, str]:
    """Return every visible file with a digest of its bytes."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file()) if folder.exists() else ()
    names = {str(path.relative_to(folder)): path for path in files}
    return {
        name: hashlib.blake2b(path.read_bytes()).hexdigest() for name, path in names.items() if not name.startswith(".")
    }
