"""Files that are mapped into memory after their space was reserved.

A store into a mapped file without reserved space kills the process (``SIGBUS``) if the file system or the memory cgroup
is full.

The slots of a local tier (:mod:`rankless.tier.slots`) are mapped so on each rank when it prepares a save, and parts are
mapped to be read in loads, rebuilds and drains. The reservation comes before the first store into the mapping.
"""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import suppress
from pathlib import Path

import numpy as np

from rankless.errors import SpaceShortageError
from rankless.storage.aligned_memory import Bytes
from rankless.storage.cgroup_memory import free_cgroup_bytes
from rankless.storage.posix import wrap_os_errors

EMPTY: Bytes = np.empty(0, np.uint8)

#: The errors of a reservation if there is not enough space.
_FULL = {errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG}


def count_free_bytes(folder: Path) -> int:
    """Return the bytes that a folder's file system, and the memory cgroup of this process, have left."""
    with wrap_os_errors("inspect", folder):
        status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    in_cgroup = free_cgroup_bytes()
    return free if in_cgroup is None else min(free, in_cgroup)


def require_free_bytes(folder: Path, nbytes: int) -> None:
    """Raise ``SpaceShortageError`` if a folder does not have ``nbytes`` bytes left."""
    if nbytes > (free := count_free_bytes(folder)):
        raise _shortage_error(folder, nbytes, free)


def map_reserved(path: Path, nbytes: int, held: int = 0) -> Bytes:
    """Create a file of at least ``nbytes`` bytes, or enlarge it. Reserve its space, and map it to be written.

    It had ``held`` reserved bytes before. Raises ``SpaceShortageError``; then it has as many as before.
    """
    size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    require_free_bytes(path.parent, size - held)
    with wrap_os_errors("create", path):
        fd = _open_to_write(path)
        try:
            _reserve(fd, path, 0, size, held)
            return np.frombuffer(mmap.mmap(fd, size), np.uint8)
        finally:
            os.close(fd)


def map_to_read(path: Path, nbytes: int) -> Bytes:
    """Map the first ``nbytes`` bytes of a file to be read. Raises ``StorageError`` if it has fewer."""
    if not nbytes:
        return EMPTY
    with wrap_os_errors("open", path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)  # a FIFO would block
        try:
            if os.fstat(fd).st_size < nbytes:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            # A private mapping: torch wants writable memory, and nothing is written to it.
            return np.frombuffer(mmap.mmap(fd, nbytes, access=mmap.ACCESS_COPY), np.uint8)
        finally:
            os.close(fd)


def _open_to_write(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _reserve(fd: int, path: Path, start: int, nbytes: int, held: int) -> None:
    """Reserve space. After a failure the file has ``held`` bytes."""
    try:
        os.posix_fallocate(fd, start, nbytes)
    except OSError as error:
        with suppress(OSError):
            os.ftruncate(fd, held)  # not less: another process may have mapped it
        if error.errno not in _FULL:
            raise
        raise _shortage_error(path.parent, nbytes, count_free_bytes(path.parent)) from error


def _shortage_error(folder: Path, needed: int, free: int) -> SpaceShortageError:
    text = f"{folder} needs {needed:,} more bytes, and {free:,} are free"
    return SpaceShortageError(errno.ENOSPC, text, needed=needed, free=free)
