"""The calls of a client while its server restarts, and while the client is cut off."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from campaigns.hosts import network
from campaigns.hosts.scenes.names import name_of
from campaigns.hosts.testbed import Testbed, mount_point

#: How long a client makes calls, and how often a server restarts.
_SECONDS, _RESTARTS = 25.0, 6


class Churn(NamedTuple):
    """Results of a client's calls: their number, the seconds of the slowest, and how often each error came."""

    calls: int
    slowest: float
    errors: Counter[str]

    def __str__(self) -> str:
        errors = ", ".join(f"{count} {error}" for error, count in sorted(self.errors.items())) or "none"
        return f"{self.calls} calls, the slowest {self.slowest:.1f} s, errors: {errors}"


def churn(folder: Path, seconds: float) -> Churn:
    """Create, link, rename and remove files and folders, each under a new name, so that no call can fail."""
    folder.mkdir()
    started = time.monotonic()
    calls, slowest, errors = 0, 0.0, Counter[str]()
    for number in range(10**9):
        if time.monotonic() > started + seconds:
            break
        for name, call in _calls(folder, f"{number}"):
            begun = time.monotonic()
            try:
                call()
            except OSError as error:
                errors[f"{name} {name_of(error.errno)}"] += 1
            calls, slowest = calls + 1, max(slowest, time.monotonic() - begun)
    return Churn(calls, slowest, errors)


def _calls(folder: Path, number: str) -> list[tuple[str, Callable[[], object]]]:
    staging, final = folder / f".{number}", folder / number
    return [
        ("mkdir", staging.mkdir),
        ("exclusive create", lambda: _create(staging / "file")),
        ("link", lambda: os.link(staging / "file", staging / "link")),
        ("rename", lambda: staging.rename(final)),
        ("unlink", (final / "link").unlink),
        ("unlink", (final / "file").unlink),
        ("rmdir", final.rmdir),
    ]


def _create(path: Path) -> None:
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    try:
        os.write(fd, b"x" * 10_000)
        os.fsync(fd)
    finally:
        os.close(fd)


def run(testbed: Testbed, kinds: list[str], report: Callable[[str], None]) -> None:
    """Report what two clients get during restarts of the server, and a client that is cut off."""
    for kind in kinds:
        for number in range(_RESTARTS):
            report(f"{kind} | restart of the server {number + 1} | {_restart_server(testbed, kind)}")
        for seconds in (5.0, 60.0):
            report(f"{kind} | cut off for {seconds:.0f} s | {_cut_off(testbed, kind, seconds)}")


def _subject(kind: str) -> Path:
    return mount_point(kind) / f"churn-{kind}-{time.monotonic_ns()}"


def _restart_server(testbed: Testbed, kind: str) -> str:
    first, second = (client.worker() for client in testbed.clients[:2])
    with first, second:
        for worker in (first, second):
            worker.send(churn, _subject(kind), _SECONDS)
        time.sleep(5)
        testbed.server.kill()
        testbed.start_server()
        return " and ".join(str(worker.receive()) for worker in (first, second))


def _cut_off(testbed: Testbed, kind: str, seconds: float) -> str:
    client = testbed.clients[0]
    with client.worker() as worker:
        worker.send(churn, _subject(kind), _SECONDS + seconds)
        time.sleep(5)
        network.cut_link(client.spec.number)
        time.sleep(seconds)
        network.restore_link(client.spec.number)
        with suppress(TimeoutError):
            return str(worker.receive(180.0 + seconds))
    return "still hangs 180 s later"
