"""Locks that another host sees or does not see, and those of a host that died or was cut off."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from campaigns.hosts import network
from campaigns.hosts.machine import Machine
from campaigns.hosts.testbed import Testbed, mount_point
from rankless.storage.file_lock import FileLock

#: How long a client waits for a lock of a host that died, in seconds: the server's lease is 10.
_PATIENCE = 60.0

_OPEN: list[int] = []

#: How a file is opened for each kind of lock.
KINDS_OF_LOCKS = {
    "flock of a directory": os.O_RDONLY | os.O_DIRECTORY,
    "flock of a file opened to read": os.O_RDONLY,
    "flock of a file opened to write": os.O_RDWR,
    "record lock": os.O_RDWR,
    "open file description lock": os.O_RDWR,
    "lock of rankless": os.O_RDWR,
}


#: The kind of lock that pending directories have: both kinds that some file systems show to other hosts.
_CHOSEN = "lock of rankless"


def make_subject(folder: Path) -> None:
    """Create a directory to lock, and a file in it."""
    folder.mkdir()
    (folder / "lock").touch()


def take(folder: Path, kind: str) -> str:
    """Try to lock. Return ``"held"``, or the error's name; keep the file open."""
    flags = KINDS_OF_LOCKS[kind]
    try:
        if kind == _CHOSEN:
            lock = FileLock(folder / "lock")
            _OPEN.append(lock.fd)
            return "held" if lock.held else "not supported"
        fd = os.open(folder if flags & os.O_DIRECTORY else folder / "lock", flags)
        _OPEN.append(fd)
        if kind.startswith("flock"):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        elif kind == "record lock":
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error.errno))
    return "held"


def release() -> None:
    """Release all locks by closing their files."""
    while _OPEN:
        os.close(_OPEN.pop())


def wait_for_lock(folder: Path, kind: str) -> str:
    """Try to lock until it succeeds. Return the seconds that it took, or the last error."""
    started = time.monotonic()
    while (answer := take(folder, kind)) != "held" and time.monotonic() < started + _PATIENCE:
        release()
        time.sleep(0.25)
    return f"after {time.monotonic() - started:.1f} s" if answer == "held" else f"{answer} for {_PATIENCE:.0f} s"


def write_after(folder: Path) -> str:
    """Write to the file that this process has locked, and make it durable. Return ``"written"`` or the error's name."""
    del folder
    try:
        os.pwrite(_OPEN[-1], b"x", 0)
        os.fsync(_OPEN[-1])
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error.errno))
    return "written"


def run(testbed: Testbed, kinds: list[str], report: Callable[[str], None]) -> None:
    """Report what a second client gets while the first one holds a lock, and after the first one died."""
    for kind in kinds:
        for lock in KINDS_OF_LOCKS:
            report(f"{kind} | {lock} | {_conflict(testbed.clients, kind, lock)}")
    lock = _CHOSEN
    for kind in kinds:
        for what, away in (("cut off", _cut_off), ("stopped", _stopped)):
            report(f"{kind} | {lock}, holder {what} for 30 s | {_lose_touch(testbed.clients, kind, lock, away)}")
    for kind in kinds:
        report(f"{kind} | {lock}, holder killed | {_die(testbed, kind, lock)}")


def _subject(kind: str, lock: str) -> Path:
    return mount_point(kind) / f"{kind}-{lock.replace(' ', '-')}-{time.monotonic_ns()}"


def _conflict(clients: list[Machine], kind: str, lock: str) -> str:
    folder = _subject(kind, lock)
    with clients[0].worker() as holder, clients[0].worker() as neighbour, clients[1].worker() as other:
        holder.call(make_subject, folder)
        answers = [worker.call(take, folder, lock) for worker in (holder, neighbour, other)]
        neighbour.call(release)
        other.call(release)
        holder.call(release)
        after = other.call(wait_for_lock, folder, lock)
    return f"holder: {answers[0]}; same host: {answers[1]}; other host: {answers[2]}; released: {after}"


def _cut_off(host: Machine) -> None:
    network.cut_link(host.spec.number)
    time.sleep(30)
    network.restore_link(host.spec.number)


def _stopped(host: Machine) -> None:
    host.stop()
    time.sleep(30)
    host.resume()


def _lose_touch(clients: list[Machine], kind: str, lock: str, away: Callable[[Machine], None]) -> str:
    folder = _subject(kind, lock)
    with clients[0].worker() as holder, clients[1].worker() as other:
        holder.call(make_subject, folder)
        holder.call(take, folder, lock)
        other.send(wait_for_lock, folder, lock)
        away(clients[0])
        answer = other.receive()
        with suppress(TimeoutError):
            return f"other host: {answer}; then the holder writes: {holder.call(write_after, folder, seconds=240)}"
    return f"other host: {answer}; then the holder's write hangs for 240 s"


def _die(testbed: Testbed, kind: str, lock: str) -> str:
    holder_host, other_host = testbed.clients[:2]
    folder = _subject(kind, lock)
    with other_host.worker() as other:
        with holder_host.worker() as holder:
            holder.call(make_subject, folder)
            holder.call(take, folder, lock)
            holder_host.kill()
        answer = other.call(wait_for_lock, folder, lock)
        other.call(release)
        testbed.restart(holder_host)
        later = other.call(wait_for_lock, folder, lock)
    return f"other host: {answer}; after the holder's reboot: {later}"
