"""Runs one history: starts incarnations, lets incidents happen, and asks the oracle what must be loaded."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from campaigns.common.job import Job
from campaigns.common.state import ViolationError
from campaigns.tier.histories.durable import check_run_directory
from campaigns.tier.histories.notes import read_notes
from campaigns.tier.histories.oracle import Known, Oracle
from campaigns.tier.histories.plan import Incarnation, Incident, draw_history
from campaigns.tier.histories.training import SIGNAL_FOR_STACKS, Places, train

#: The seconds after which a job counts as hanging, and those in which a moment must come.
_MAX_SECONDS, _PATIENCE = 240.0, 3.0

#: The most seconds after an incident until other ranks are killed, if they are not left to fail.
_SOON = 0.3


@dataclass(frozen=True)
class Happened:
    """An incident that happened. ``phase`` says where; ``is_hit``: its moment was reached."""

    kind: str
    phase: str
    is_hit: bool
    lost_hosts: int


@dataclass
class HistoryOutcome:
    """The incidents of a history, and what was violated."""

    happened: list[Happened] = field(default_factory=list)
    violation: str = ""


def run_history(seed: int, length: int, scratch: Path, only: str = "") -> HistoryOutcome:
    """Run a history in a folder of its own, which stays if something is violated. Return what happened."""
    places = Places(scratch / f"history{seed}")
    places.notes.mkdir(parents=True)
    outcome = HistoryOutcome()
    plan = draw_history(seed, length, only)
    try:
        _History(places, outcome).run(plan)
    except ViolationError as error:
        number = len(outcome.happened)
        repeat = f"--histories 1 --seed {seed} --length {length}" + (f" --only '{only}'" if only else "")
        past = "".join(f"\n  {incarnation}" for incarnation in plan[: number + 1])
        outcome.violation = f"{error}\n  in incarnation {number} of the history {repeat}, in {places.folder}:{past}"
    else:
        shutil.rmtree(places.folder)
    return outcome


class _History:
    """A history in progress. ``_alive`` is the job before, if it was stopped or goes on, and who wakes up."""

    def __init__(self, places: Places, outcome: HistoryOutcome) -> None:
        self._places, self._outcome, self._oracle = places, outcome, Oracle()
        self._alive: _Alive | None = None

    def run(self, plan: Sequence[Incarnation]) -> None:
        """Run all incarnations."""
        with ExitStack() as jobs:
            for incarnation in plan:
                before, self._alive = self._alive, None
                self._run_incarnation(incarnation, before, jobs)
                if before is not None:
                    before.job.__exit__(None, None, None)
            history = self._oracle.history
            durable = set().union(*(known.states("durable") for known in history))
            check_run_directory(self._places.run, [known.states("save") for known in history], durable)

    def _run_incarnation(self, incarnation: Incarnation, before: _Alive | None, jobs: ExitStack) -> None:
        self._refresh()
        known = Known(incarnation, self._oracle.require(incarnation))
        job = Job(
            incarnation.size,
            incarnation.store,
            self._places.folder,
            train,
            self._places,
            incarnation,
            hosts=incarnation.hosts,
        )
        jobs.push(job)
        self._oracle.history.append(known)
        incident = incarnation.incident
        waiting = _Waiting(job, before)
        is_hit = self._await_incident(waiting, incident)
        self._check_no_early_failure(job)
        self._refresh()
        self._oracle.check_load(known)
        self._let_happen(waiting, incarnation)
        self._refresh()
        self._oracle.check_load(known)
        self._outcome.happened.append(Happened(incident.kind, incident.phase, is_hit, len(incident.lost)))

    def _refresh(self) -> None:
        for known in self._oracle.history:
            known.notes = read_notes(self._places.notes, known.plan.number)

    def _await_incident(self, waiting: _Waiting, incident: Incident) -> bool:
        """Wait until the incident is due. Return whether the victim has reached its moment."""
        job, word = waiting.job, "killed" if incident.kind.startswith("kill") else "stopped"

        def has_come() -> bool:
            return (incident.victim, word) in job.messages

        def is_ready() -> bool:
            has_begun = (0, "load has begun") in job.messages and not incident.is_loaded and incident.moment is None
            return has_come() or bool(job.outcomes) or has_begun or job.count_messages("loaded") == job.size

        if not waiting.wait_until(is_ready, _MAX_SECONDS):
            raise _describe_hang(job)
        if incident.kind == "end":
            if not waiting.wait_until(job.have_ended, _MAX_SECONDS):
                raise _describe_hang(job)
            return True
        seconds = incident.seconds if incident.moment is None else _PATIENCE
        waiting.wait_until(lambda: has_come() or bool(job.outcomes), seconds)
        return has_come() or incident.moment is None

    def _check_no_early_failure(self, job: Job) -> None:
        """Raise ``ViolationError`` if ranks have failed before anything happened."""
        is_hit = any(word in {"killed", "stopped"} for _, word in job.messages)
        failed = {rank: (end.error, end.message) for rank, end in job.outcomes.items() if end.error}
        # On a machine with too much to do, a rank may be late.
        if not is_hit and any(kind != "RankTimeoutError" for kind, _ in failed.values()):
            raise ViolationError(f"ranks fail before anything happens to them: {failed}")

    def _let_happen(self, waiting: _Waiting, incarnation: Incarnation) -> None:
        incident, job = incarnation.incident, waiting.job
        victims = _list_victims(incarnation)
        if incident.kind in {"end", "go on"} or incident.kind.startswith("stop"):
            for victim in victims:
                job.send_signal(victim, signal.SIGSTOP)
            wakes = victims if incident.kind.startswith("stop") else []
            self._alive = _Alive(job, wakes, incident.wakes_after)
            if incident.kind == "end":
                job.__exit__(None, None, None)
                self._alive = None
            return
        for victim in victims:
            job.send_signal(victim, signal.SIGKILL)
        others = [rank for rank in range(job.size) if rank not in victims]
        if not incident.is_patient:
            waiting.wait_until(lambda: job.have_ended(*victims), _SOON * incident.seconds)
        elif not waiting.wait_until(lambda: job.have_ended(*victims), _MAX_SECONDS):
            raise _describe_hang(job)
        untyped = {rank: job.outcomes[rank] for rank in others if rank in job.outcomes}
        untyped = {rank: end for rank, end in untyped.items() if end.error and not end.is_typed}
        if untyped:
            raise ViolationError(f"ranks raised errors of another type: {untyped}")
        job.__exit__(None, None, None)
        for host in incident.lost:
            shutil.rmtree(self._places.tier(host), ignore_errors=True)


def _describe_hang(job: Job) -> ViolationError:
    """Return the violation that ranks hang. They write their stacks into files of the history."""
    hanging = [rank for rank in range(job.size) if rank not in job.outcomes]
    for rank in hanging:
        job.send_signal(rank, SIGNAL_FOR_STACKS)
    time.sleep(1.0)
    return ViolationError(f"ranks {hanging} hang; ranks have said {sorted(job.messages)}")


def _list_victims(incarnation: Incarnation) -> list[int]:
    kind, victim = incarnation.incident.kind, incarnation.incident.victim
    if kind in {"end", "go on"}:
        return []
    if kind.endswith("all"):
        return list(range(incarnation.size))
    host = incarnation.hosts[victim]
    return [
        rank
        for rank in range(incarnation.size)
        if rank == victim or ("host" in kind and host == incarnation.hosts[rank])
    ]


@dataclass
class _Alive:
    """A job that is stopped or goes on while the next one runs. The ranks ``wakes`` go on ``after`` seconds."""

    job: Job
    wakes: Sequence[int]
    after: float


class _Waiting:
    """Waits for a job, and wakes the one before meanwhile."""

    def __init__(self, job: Job, before: _Alive | None) -> None:
        self.job, self._before, self._started = job, before, time.monotonic()

    def wait_until(self, until: Callable[[], bool], seconds: float) -> bool:
        """Wait as :meth:`Job.wait_until`."""
        ends = time.monotonic() + seconds
        while self._before is not None:
            left = self._started + self._before.after - time.monotonic()
            if left <= 0:
                for rank in self._before.wakes:
                    self._before.job.send_signal(rank, signal.SIGCONT)
                self._before = None
            elif self.job.wait_until(until, min(left, max(0.0, ends - time.monotonic()))) or time.monotonic() >= ends:
                return until()
        return self.job.wait_until(until, max(0.0, ends - time.monotonic()))
