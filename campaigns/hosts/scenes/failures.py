"""Saves of a job on two hosts, during which a process, a host, the network or the file server fails.

After each of them the run has the old or the new checkpoint, all living ranks have returned or raised within their
timeout, and a new job continues from there.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from campaigns.hosts import guest, network
from campaigns.hosts.scenes import saves
from campaigns.hosts.testbed import Testbed, mount_point
from campaigns.hosts.workers import RemoteError, Worker

#: The timeout of the saves, and the seconds beyond it in which all living ranks must know the outcome: two that are
#: promised, and two more because each call takes several times as long here as on real hosts.
_TIMEOUT, _GRACE = 20.0, 4.0

#: The seconds after the server is back in which clients still wait: its grace period, and the pauses of their retries.
_RECOVERY = 60.0

#: The steps of the saves: one with imports and the first plan, one whose duration is measured, and the one that fails.
_FIRST, _MEASURED, _DISTURBED, _CONTINUED = 1, 2, 3, 4

_PORTS = itertools.count(31_000)
_SYNCHRONOUS: tuple[dict[str, bool], ...] = ({},)


class Job(NamedTuple):
    """A job of two ranks, on the first two clients, and the process of each rank."""

    ranks: list[Worker]
    pids: list[int]


class Event(NamedTuple):
    """What happens during a save. ``dead`` are the ranks that it kills. ``begin`` returns what ends the event.

    For ``recovery`` seconds after the event, calls of living ranks may still wait in the kernel, where no timeout can
    end them.
    """

    name: str
    begin: Callable[[Testbed, Job], Callable[[], None]]
    dead: tuple[int, ...] = ()
    recovery: float = 0.0


def kill_process(pid: int) -> None:
    """Kill a process of this host."""
    os.kill(pid, signal.SIGKILL)


def _nothing() -> None:
    pass


def _kill_rank(rank: int) -> Callable[[Testbed, Job], Callable[[], None]]:
    def begin(testbed: Testbed, job: Job) -> Callable[[], None]:
        with testbed.clients[rank].worker() as worker:
            worker.call(kill_process, job.pids[rank])
        return _nothing

    return begin


def _kill_host(rank: int) -> Callable[[Testbed, Job], Callable[[], None]]:
    def begin(testbed: Testbed, _: Job) -> Callable[[], None]:
        testbed.clients[rank].kill()
        return lambda: testbed.restart(testbed.clients[rank])

    return begin


def _restart_server(testbed: Testbed, _: Job) -> Callable[[], None]:
    testbed.server.kill()
    testbed.start_server()
    return _nothing


def _cut_off(rank: int, seconds: float) -> Callable[[Testbed, Job], Callable[[], None]]:
    def begin(testbed: Testbed, _: Job) -> Callable[[], None]:
        number = testbed.clients[rank].spec.number
        network.cut_link(number)
        time.sleep(seconds)
        network.restore_link(number)
        return _nothing

    return begin


EVENTS = (
    Event("rank 1 killed", _kill_rank(1), (1,)),
    Event("rank 0 killed", _kill_rank(0), (0,)),
    Event("host of rank 1 killed", _kill_host(1), (1,)),
    Event("host of rank 0 killed", _kill_host(0), (0,)),
    Event("server restarted", _restart_server, recovery=_RECOVERY),
    Event("host of rank 1 cut off for 5 s", _cut_off(1, 5.0)),
    Event("host of rank 0 cut off for 5 s", _cut_off(0, 5.0)),
    Event("host of rank 1 cut off for 60 s", _cut_off(1, 60.0), recovery=_RECOVERY),
)


def run(testbed: Testbed, kinds: list[str], times: int, report: Callable[[str], None]) -> None:
    """Let each event happen ``times`` times on each kind of mount, at random moments."""
    moments = random.Random(0)
    for kind in kinds:
        for event in EVENTS:
            outcomes = Counter(_try_event(testbed, kind, event, moments.random()) for _ in range(times))
            report(f"{kind} | {event.name} | " + "; ".join(f"{count}: {what}" for what, count in outcomes.items()))


def _try_event(testbed: Testbed, kind: str, event: Event, moment: float) -> str:
    """Save while the event happens, then look at the run, and continue it. Return the outcome.

    ``moment`` is the part of the save's usual duration after which the event begins.
    """
    run = mount_point(kind) / f"failures-{kind}-{time.monotonic_ns()}"
    with _start_job(testbed) as job:
        began = 0.0
        for step in (_FIRST, _MEASURED):
            began = time.monotonic()
            if _save_on_all(job, run, step) != ["saved", "saved"]:
                return f"WRONG: save {step} failed"
        started = time.monotonic()
        for worker in job.ranks:
            worker.send(saves.save, run, _DISTURBED, _SYNCHRONOUS, _TIMEOUT)
        time.sleep(moment * (started - began))
        finish = event.begin(testbed, job)
        event_seconds = time.monotonic() - started
        answers = _await_answers(job, event, started + max(_TIMEOUT, event_seconds + event.recovery) + _GRACE)
        seconds = time.monotonic() - started
    finish()
    problem = _find_problem(testbed, run, answers)
    kinds = sorted({answer.partition(":")[0] for answer in answers})
    return f"WRONG: {problem} ({'; '.join(answers)})" if problem else f"{', '.join(kinds)} after {seconds:.0f} s"


@contextmanager
def _start_job(testbed: Testbed) -> Iterator[Job]:
    port, address = next(_PORTS), testbed.clients[0].address
    ranks = [client.worker() for client in testbed.clients[:2]]
    try:
        saves.start_job(ranks, address, port)
        yield Job(ranks, [worker.call(os.getpid) for worker in ranks])
    finally:
        for worker in ranks:
            with suppress(OSError):
                worker.close()


def _save_on_all(job: Job, run: Path, step: int) -> list[str]:
    return saves.call_all(job.ranks, saves.save, run, step, _SYNCHRONOUS)


def _await_answers(job: Job, event: Event, deadline: float) -> list[str]:
    """Return what the living ranks answered."""
    answers = []
    for rank, worker in enumerate(job.ranks):
        if rank not in event.dead:
            try:
                answers.append(worker.receive(max(0.0, deadline - time.monotonic())))
            except TimeoutError:
                answers.append("no answer within the timeout")
            except (RemoteError, EOFError, OSError) as error:
                answers.append(f"not an error of rankless: {error}")
    return answers


def _find_problem(testbed: Testbed, run: Path, answers: list[str]) -> str:
    """Return what is wrong with the run, or with a job that continues it; ``""`` if nothing is."""
    if any(answer.startswith(("no answer", "not an error")) for answer in answers):
        return "a rank is stuck or has another error"
    with testbed.clients[2].worker() as looker, testbed.server.worker() as server:
        steps = [step for step in (_MEASURED, _DISTURBED) if not looker.call(saves.newest, run, step)]
        if not steps or ("saved" in answers and steps != [_DISTURBED]):
            return f"the newest checkpoint is not as expected: {looker.call(saves.newest, run, _DISTURBED)}"
        for worker, path in ((looker, run), (server, guest.EXPORT / run.name)):
            if wrong := worker.call(saves.damage, path):
                return str(wrong)
    with _start_job(testbed) as job:
        if any(loaded := saves.call_all(job.ranks, saves.load, run, steps[0])):
            return f"a new job did not load it: {loaded}"
        if (saved := _save_on_all(job, run, _CONTINUED)) != ["saved", "saved"]:
            return f"a new job did not save: {saved}"
    with testbed.clients[2].worker() as looker:
        return str(looker.call(saves.newest, run, _CONTINUED))
