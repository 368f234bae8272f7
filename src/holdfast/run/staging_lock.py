"""The lock of a staging directory, and the proof that its owner is dead.

No process may remove the staging directory of a living save, and each may remove that of a dead one. The owner locks
``.TAG.RUN.ID.lock``, next to the directory and older than it. The kernel releases the lock however the owner ends. That
others can take the lock is a proof only if they would see it while the owner lives. That is so

- on the owner's host, which the file names;
- on file systems whose hosts are known to see each other's locks (:func:`~holdfast.storage.filesystems.shares_locks`);
- on file systems of which that is not known, if another host of the owner's job has seen the lock, and has written so
  into the file.

In all other cases the owner counts as dead if nothing in the directory has changed for a day, by the clock of the file
system: clocks of hosts may differ.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from contextlib import suppress
from pathlib import Path

from holdfast.errors import StorageError
from holdfast.ondisk.hidden_names import HiddenName
from holdfast.storage.file_lock import FileLock
from holdfast.storage.filesystems import shares_locks
from holdfast.storage.posix import host_id, last_change_time, path_exists, wrap_os_errors, write_fully

#: Seconds without a change after which the owner counts as dead if its lock may be invisible.
_ABANDONED_SECONDS = 86_400.0

#: Bytes of the file for the owner's host; behind them is the host that has seen the lock.
_HOST_BYTES = 64

#: How often :func:`acquire_lock` tries again while other processes look at the file, and the seconds between.
_MAX_ATTEMPTS, _RETRY_SECONDS = 100, 0.005

_log = logging.getLogger("holdfast")


class StagingLock:
    """The lock of the staging directory ``name`` in ``parent``, held by its owner, or by a process that cleans up."""

    def __init__(self, parent: Path, name: HiddenName) -> None:
        """Take the lock. Raises ``BlockingIOError`` if another process has it, and other errors as ``OSError``."""
        self._partial = parent / name.with_state("partial").name
        self._lock, self._is_owner = FileLock(lock_path(parent, name)), False

    def become_owner(self) -> None:
        """Write into the file that this process creates the staging directory."""
        self._is_owner = True
        write_fully(self._lock.fd, host_id().encode().ljust(_HOST_BYTES), 0)

    def has_dead_owner(self, folder: Path, seconds: float = 0.0) -> bool:
        """Return whether the owner is dead, and nothing in ``folder`` has changed for at least ``seconds``.

        Raises ``StorageError`` if the directory is missing.
        """
        if not self._lock.held:
            return False
        required = seconds if self._proves_death() else _ABANDONED_SECONDS
        return required <= 0 or self._now() - last_change_time(folder) > required

    def _proves_death(self) -> bool:
        """Return whether this process would not have got the lock if the owner were alive."""
        raw = os.pread(self._lock.fd, 2 * _HOST_BYTES, 0)
        if raw[:_HOST_BYTES].strip() == host_id().encode():
            return True
        is_shared, was_seen_elsewhere = shares_locks(self._partial.parent), len(raw) > _HOST_BYTES
        return was_seen_elsewhere if is_shared is None else is_shared

    def _now(self) -> float:
        """Return the time of the file system's clock."""
        with wrap_os_errors("update", self._lock.path):
            os.utime(self._lock.fd)
            return os.fstat(self._lock.fd).st_mtime

    def close(self) -> None:
        """Release the lock. The owner, or a process that has removed the staging directory, removes the lock file.

        Later calls do nothing.
        """
        with suppress(StorageError):  # if the directory cannot be looked at, the file stays
            if self._is_owner or not path_exists(self._partial):
                self._lock.remove()
        self._lock.close()


def lock_path(parent: Path, name: HiddenName) -> Path:
    """Return the path of a staging directory's lock file."""
    return parent / name.with_state("lock").name


def acquire_lock(parent: Path, name: HiddenName) -> StagingLock:
    """Take the lock of a staging directory that does not exist yet.

    A process that cleans up may hold it for a moment, and remove its file. Raises ``StorageError`` if the lock is taken
    again and again.
    """
    for _ in range(_MAX_ATTEMPTS):
        with wrap_os_errors("lock", lock_path(parent, name)), suppress(BlockingIOError):
            lock = StagingLock(parent, name)
            try:
                lock.become_owner()
            except BaseException:
                lock.close()
                raise
            return lock
        time.sleep(_RETRY_SECONDS)
    raise StorageError(
        errno.EBUSY, f"{lock_path(parent, name)} is locked: another process uses the staging directory, or removes it"
    )


def confirm_lock(parent: Path, name: HiddenName) -> None:
    """Write into the lock file of a living owner on another host that this host sees the lock.

    If it does not see it, leftovers of killed jobs stay for a day, which is logged. No failure matters to the save.
    """
    path = lock_path(parent, name)
    try:
        FileLock(path, create=False).close()
    except BlockingIOError:
        with suppress(OSError):
            _record_witness(path)
    except OSError:
        return
    else:
        if path_exists(path):
            _log.warning(
                "hosts do not see each other's locks in %s: leftovers of killed jobs stay for a day",
                parent,
            )


def _record_witness(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        write_fully(fd, host_id().encode().ljust(_HOST_BYTES), _HOST_BYTES)
    finally:
        os.close(fd)
