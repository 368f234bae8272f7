"""Jobs of one rank each, on several hosts, save into, overwrite, remove from and read one run directory.

The scenarios and what they allow are those of ``campaigns.side_by_side``. Each job is on a client of its own.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from campaigns.hosts import guest
from campaigns.hosts.scenes import saves
from campaigns.hosts.testbed import Testbed, mount_point
from campaigns.hosts.workers import RemoteError, Worker
from campaigns.side_by_side.scenarios import SCENARIOS, check_outcome, run_scenario

_PORT = 29_700


def find_violation(run: Path, name: str, seen: list[Counter[str]]) -> str:
    """Return what a scenario left or reported although it is forbidden, or ``""``."""
    try:
        check_outcome(run, name, seen)
    except AssertionError as error:
        return str(error)
    return ""


def run(testbed: Testbed, kinds: list[str], times: int, report: Callable[[str], None]) -> None:
    """Run each scenario for ``times`` seconds on each kind of mount."""
    ports = itertools.count(_PORT)
    # Names are exchanged in two steps on every mount, so the scenarios that force this are the same as others.
    names = [name for name, scenario in SCENARIOS.items() if not scenario.two_steps]
    for kind, name in itertools.product(kinds, names):
        with ExitStack() as stack:
            clients = testbed.clients[: len(SCENARIOS[name].actions)]
            jobs = [stack.enter_context(client.worker()) for client in clients]
            server = stack.enter_context(testbed.server.worker())
            saves.start_job(jobs, testbed.clients[0].address, next(ports))
            report(f"{kind} | {name} | {_run_jobs(jobs, server, kind, name, times)}")


def _run_jobs(jobs: list[Worker], server: Worker, kind: str, name: str, seconds: float) -> str:
    folder = f"jobs-{kind}-{time.monotonic_ns()}"
    for job in jobs:
        job.send(run_scenario, str(mount_point(kind) / folder), name, float(seconds))
    try:
        seen = [job.receive() for job in jobs]
    except RemoteError as error:
        return f"WRONG: {error}"
    if violation := server.call(find_violation, guest.EXPORT / folder, name, seen):
        return f"WRONG: {violation}"
    return "; ".join(", ".join(f"{number} {outcome}" for outcome, number in counts.items()) for counts in seen)
