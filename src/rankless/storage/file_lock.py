"""Locks on files that processes of all hosts see, as far as a file system allows it.

A network file system keeps locks of *directories* to each client, and so does Linux with ``flock`` of a file that is
open for reading only on NFS 4. So the lock is taken on a regular file that is open for writing. No kind of lock is seen
by all hosts on every file system: FUSE forwards ``flock`` and not always record locks; a process on an NFS server sees
the record locks of its clients and not their ``flock``. So both kinds are taken.

Locks of pending directories and pins (:mod:`rankless.run.owned_lock`), of slots and folders of local tiers (``tier/``),
and of drains are such locks. Processes of other versions take the same locks: both kinds must be taken, and the file
must be compared after that.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from contextlib import suppress
from pathlib import Path

from rankless.storage.fork_safety import ClosedInForks


class FileLock(ClosedInForks):
    """An exclusive lock on a file. The end of the process, however it comes, releases it.

    If the file system has no locks, ``held`` is false and other owners are unknown.
    """

    def __init__(self, path: Path, *, create: bool = True) -> None:
        """Lock a file, and create it if it is missing and ``create`` is true.

        Raises ``BlockingIOError`` if another process has locked or removed it.
        """
        self.path, self.held, self.fd = path, False, -1
        super().__init__()
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW  # a link in a shared directory may lead anywhere
        self.fd = os.open(path, flags | (os.O_CREAT if create else 0), 0o666)
        try:
            self.held = _try_lock(self.fd)
            _check_not_removed(path, self.fd)
        except BaseException:
            self.close()
            raise

    @property
    def is_open(self) -> bool:
        """False after :meth:`close`, and in forked processes."""
        return self.fd >= 0

    @property
    def is_lost(self) -> bool:
        """True if another process may lock the path now: this is closed, or the file was removed or replaced."""
        if not self.is_open:
            return True
        try:
            _check_not_removed(self.path, self.fd)
        except BlockingIOError:
            return True
        return False

    def remove(self) -> None:
        """Remove the file, and release the lock. Later calls do nothing."""
        if self.is_open:
            with suppress(OSError):
                self.path.unlink()
        self.close()

    def close(self) -> None:
        """Unlock and close the file, even if another process has its descriptor too. Later calls do nothing."""
        if self.held:
            with suppress(OSError):
                fcntl.flock(self.fd, fcntl.LOCK_UN)
            with suppress(OSError):
                _set_record_lock(self.fd, fcntl.F_UNLCK)
        self.close_in_fork()

    def close_in_fork(self) -> None:
        """Close the file in a forked process. The parent process keeps the lock."""
        fd, self.fd, self.held = self.fd, -1, False
        if fd >= 0:
            with suppress(OSError):  # nothing that matters was written, and the descriptor is closed even so
                os.close(fd)


def _try_lock(fd: int) -> bool:
    """Take both kinds of locks. Return whether any is supported. Raises ``BlockingIOError``."""
    held = False
    for take_lock in (_take_flock, _take_record_lock):
        try:
            take_lock(fd)
        except BlockingIOError:
            raise
        except OSError:
            continue
        held = True
    return held


def _take_flock(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _take_record_lock(fd: int) -> None:
    _set_record_lock(fd, fcntl.F_WRLCK)


def _set_record_lock(fd: int, kind: int) -> None:
    """Set an open file description lock on the whole file: unlike older record locks it belongs to ``fd``."""
    if not hasattr(fcntl, "F_OFD_SETLK"):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi", kind, os.SEEK_SET, 0, 0, 0))


def _check_not_removed(path: Path, fd: int) -> None:
    """Raise ``BlockingIOError`` if the previous owner of the lock has removed or replaced the file."""
    try:
        opened, named = os.fstat(fd), path.stat()
        is_removed = opened.st_nlink == 0 or (opened.st_dev, opened.st_ino) != (named.st_dev, named.st_ino)
    except OSError as error:
        if error.errno not in {errno.ENOENT, errno.ESTALE}:
            raise
        is_removed = True
    if is_removed:
        raise BlockingIOError(errno.EWOULDBLOCK, f"{path} was removed meanwhile")
