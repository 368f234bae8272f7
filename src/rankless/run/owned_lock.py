"""A lock on a file that names its owner's host, and the proof that the owner is dead.

The kernel releases the lock however the owner ends. That others can take it is a proof of death only if they would see
it while the owner lives. That is so

- on the owner's host, which the file names;
- on file systems where hosts are known to see each other's locks:
  :func:`~rankless.storage.filesystem_kind.shares_locks`;
- on other file systems, if another host of the owner's job has seen the lock, and has written so into the file.

In all other cases the owner counts as dead if nothing has changed for a day, by the clock of the file system: clocks of
hosts may differ.

Pending directories (:mod:`rankless.run.pending_lock`) and pins (:mod:`rankless.run.pin`) have such locks. The bytes of
the file are read by other hosts and other versions: the first 64 are the owner's host, the bytes behind them the host
that has seen the lock. In doubt the owner counts as alive.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

from rankless.errors import StorageError
from rankless.storage.file_lock import FileLock
from rankless.storage.filesystem_kind import shares_locks
from rankless.storage.posix import host_id, path_exists, wrap_os_errors, write_fully

#: Seconds without a change after which the owner counts as dead if its lock may be invisible.
ABANDONED_SECONDS = 86_400.0

#: How often :func:`acquire_as_owner` tries again, and the seconds between.
_MAX_ATTEMPTS, _RETRY_SECONDS = 100, 0.005

#: Bytes of the file for the owner's host; behind them is the host that has seen the lock.
_HOST_BYTES = 64


class OwnedLock:
    """The lock on a file, held by its owner, or by a process that asks whether the owner is dead."""

    def __init__(self, path: Path, *, create: bool = True) -> None:
        """Take the lock. Raises ``BlockingIOError`` if another process has it, and other errors as ``OSError``."""
        self.path, self.is_owner = path, False
        self._lock = FileLock(path, create=create)

    def become_owner(self) -> None:
        """Write into the file that this process owns it."""
        self.is_owner = True
        write_fully(self._lock.fd, host_id().encode().ljust(_HOST_BYTES), 0)

    def has_dead_owner(self, last_change: Callable[[], float], seconds: float = 0.0) -> bool:
        """Return whether the owner is dead, and nothing has changed for at least ``seconds``.

        ``last_change`` returns the time of the last change, by the clock of the file system.
        """
        if not self._lock.held:
            return False
        required = seconds if self.proves_death() else ABANDONED_SECONDS
        return required <= 0 or self._now() - last_change() > required

    def proves_death(self) -> bool:
        """Return whether this process would not have got the lock if the owner were alive."""
        if not self._lock.held:
            return False
        raw = os.pread(self._lock.fd, 2 * _HOST_BYTES, 0)
        if raw[:_HOST_BYTES].strip() == host_id().encode():
            return True
        is_shared, was_seen_elsewhere = shares_locks(self.path.parent), len(raw) > _HOST_BYTES
        return was_seen_elsewhere if is_shared is None else is_shared

    def _now(self) -> float:
        """Return the time of the file system's clock."""
        with wrap_os_errors("update", self.path):
            os.utime(self._lock.fd)
            return os.fstat(self._lock.fd).st_mtime

    def remove(self) -> None:
        """Remove the file, and release the lock. Later calls do nothing."""
        self._lock.remove()

    def close(self) -> None:
        """Release the lock. The owner removes the file. Later calls do nothing."""
        if self.is_owner:
            self._lock.remove()
        self._lock.close()


class _Ownable(Protocol):
    def become_owner(self) -> None: ...
    def close(self) -> None: ...


Lock = TypeVar("Lock", bound=_Ownable)


def acquire_as_owner(path: Path, take_lock: Callable[[], Lock]) -> Lock:
    """Take the lock on a new file, and become its owner.

    A process that asks whether the owner is dead may hold it for a moment, and remove the file. Raises ``StorageError``
    if the lock is taken again and again.
    """
    for _ in range(_MAX_ATTEMPTS):
        with wrap_os_errors("lock", path), suppress(BlockingIOError):
            lock = take_lock()
            try:
                lock.become_owner()
            except BaseException:
                lock.close()
                raise
            return lock
        time.sleep(_RETRY_SECONDS)
    raise StorageError(errno.EBUSY, f"{path} is locked: another process uses what it protects, or removes it")


def confirm_lock(path: Path) -> bool:
    """Write into the lock file of a living owner on another host that this host sees the lock.

    Return false if it does not see it, although the file is there. On the owner's host, and once another host has
    written it, nothing is done: so any ranks may call this.

    A save calls it through :mod:`rankless.run.pending_lock` on one rank of another host than rank 0, in the vote
    "writing".
    """
    if not _lacks_witness(path):
        return True
    try:
        FileLock(path, create=False).close()
    except BlockingIOError:
        with suppress(OSError):
            _record_witness(path)
        return True
    except OSError:
        return True
    return not path_exists(path)


def _lacks_witness(path: Path) -> bool:
    """Return whether a lock file is one of another host, and no host has written that it sees the lock."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        raw = os.pread(fd, 2 * _HOST_BYTES, 0)
    finally:
        os.close(fd)
    return len(raw) == _HOST_BYTES and raw.strip() != host_id().encode()


def _record_witness(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        write_fully(fd, host_id().encode().ljust(_HOST_BYTES), _HOST_BYTES)
    finally:
        os.close(fd)
