"""The calls of a client while its server restarts, and while the client is cut off."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from campaigns.hosts import guest, network
from campaigns.hosts.scenes.names import attempt, name_of
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


def prepare(folder: Path) -> None:
    """Create what :func:`change` needs."""
    folder.mkdir()
    for name in ("staging", "empty"):
        (folder / name).mkdir()
    for name in ("file", "old"):
        (folder / name).touch()


def look_at_names(folder: Path) -> None:
    """Look at all names that :func:`change` uses, so that only the call itself needs the server."""
    for name in ("file", "old", "staging", "empty", "new", "created", "link", "final"):
        (folder / name).exists()


#: Calls that cannot be repeated: a second one would fail.
CHANGES: dict[str, Callable[[Path], object]] = {
    "mkdir": lambda folder: (folder / "new").mkdir(),
    "exclusive create": lambda folder: os.close(os.open(folder / "created", os.O_CREAT | os.O_EXCL | os.O_WRONLY)),
    "link": lambda folder: os.link(folder / "file", folder / "link"),
    "rename": lambda folder: (folder / "staging").rename(folder / "final"),
    "unlink": lambda folder: (folder / "old").unlink(),
    "rmdir": lambda folder: (folder / "empty").rmdir(),
}


def change(folder: Path, name: str) -> str:
    """Make a call of :data:`CHANGES`. Return ``"done"``, or the name of the error."""
    return attempt(CHANGES[name], folder)


def list_names(folder: Path) -> list[str]:
    """Return the names in a folder."""
    return sorted(path.name for path in folder.iterdir())


def run(testbed: Testbed, kinds: list[str], report: Callable[[str], None]) -> None:
    """Report what two clients get during restarts of the server, and a client that is cut off."""
    for kind in kinds:
        for name, answer in _lose_replies(testbed, kind):
            report(f"{kind} | {name}, executed before the server stops, reply lost | {answer}")
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


def _lose_replies(testbed: Testbed, kind: str) -> list[tuple[str, str]]:
    """Lose the replies to calls that the server executes, and restart it: the client sends the calls again."""
    client = testbed.clients[0]
    with ExitStack() as stack:
        workers = {name: stack.enter_context(client.worker()) for name in CHANGES}
        folders = {name: _subject(kind) for name in CHANGES}
        for name, worker in workers.items():
            worker.call(prepare, folders[name])
        for name, worker in workers.items():
            worker.call(look_at_names, folders[name])
        network.lose_replies(client.spec.number)
        for name, worker in workers.items():
            worker.send(change, folders[name], name)
        time.sleep(5)
        with testbed.server.worker() as server:
            at_server = {name: server.call(list_names, guest.EXPORT / folders[name].name) for name in CHANGES}
        testbed.server.kill()
        testbed.start_server()
        network.deliver_replies(client.spec.number)
        return [
            (name, f"{worker.receive()}; in the folder before the restart: {' '.join(at_server[name])}")
            for name, worker in workers.items()
        ]


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
