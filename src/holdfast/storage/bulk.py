"""Large data: direct writes into parts of a file, and positioned reads.

``O_DIRECT`` moves whole sectors from aligned memory past the page cache. What is not whole sectors (the
first and last of a range) is written through the cache; two writers may share a sector only on one host.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from holdfast.errors import DamagedError, StorageError
from holdfast.storage.local import reported

#: Offsets, lengths and addresses of direct I/O are multiples of this, in bytes: a page, and at least a sector.
SECTOR = 4096

_DIRECT = getattr(os, "O_DIRECT", 0)


def aligned_buffer(size: int) -> memoryview:
    """Zeroed memory for ``size`` bytes that starts on a page."""
    return memoryview(mmap.mmap(-1, size))


class BulkWriter:
    """Writes byte ranges into a file that exists, directly where the file system can."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._buffered, self._direct = _open(path, os.O_WRONLY)

    def write(self, offset: int, data: memoryview) -> None:
        """Write ``data`` at ``offset`` bytes. Its address modulo :data:`SECTOR` must be that of ``offset``.

        Safe to call from several threads for ranges that do not overlap.
        """
        with reported("write", self._path):
            first = min(-offset % SECTOR, len(data))
            last = first + (len(data) - first) // SECTOR * SECTOR
            if self._direct is None or first == last:
                _write_all(self._buffered, data, offset)
                return
            _write_all(self._buffered, data[:first], offset)
            _write_all(self._buffered, data[last:], offset + last)
            self._write_direct(data[first:last], offset + first)

    def _write_direct(self, data: memoryview, offset: int) -> None:
        try:
            _write_all(self._direct, data, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            _write_all(self._buffered, data, offset)

    def sync(self) -> None:
        """Make everything written so far durable."""
        with reported("sync", self._path):
            os.fsync(self._buffered)

    def close(self) -> None:
        """Close the file; not a sync."""
        for fd in (self._buffered, self._direct):
            if fd is not None:
                os.close(fd)
        self._direct = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class BulkReader:
    """Reads byte ranges of a file, through the page cache or past it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._buffered, self._direct = _open(path, os.O_RDONLY)

    def read(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` from ``offset`` bytes on. Raises ``DamagedError`` where the file ends before."""
        self._fill(self._buffered, offset, into, len(into))

    def read_direct(self, offset: int, size: int, buffer: memoryview) -> memoryview:
        """``size`` bytes from ``offset`` on, read past the page cache into an aligned buffer of two sectors more.

        Returns the part of the buffer that they are in.
        """
        lead = offset % SECTOR
        whole = buffer[: -(-(lead + size) // SECTOR) * SECTOR]
        try:
            self._fill(self._buffered if self._direct is None else self._direct, offset - lead, whole, lead + size)
        except StorageError as error:
            if error.errno != errno.EINVAL:
                raise
            self._fill(self._buffered, offset - lead, whole, lead + size)
        return whole[lead : lead + size]

    def _fill(self, fd: int, offset: int, into: memoryview, needed: int) -> None:
        with reported("read", self._path):
            done = 0
            while done < needed:
                n = os.preadv(fd, [into[done:]], offset + done)
                if n == 0:
                    raise DamagedError(f"{self._path} ends at byte {offset + done}, inside its data: it was cut short")
                done += n

    def is_cached(self, offset: int, size: int) -> bool:
        """Whether most of a range is in the page cache; true where the system cannot tell or cannot read directly."""
        if self._direct is None or _cachestat is None:
            return True
        found = _CacheStat()
        failed = _cachestat(_CACHESTAT, self._buffered, ctypes.byref(_CacheRange(offset, size)), ctypes.byref(found), 0)
        return bool(failed) or found.cached * mmap.PAGESIZE * 2 > size

    def close(self) -> None:
        """Close the file."""
        for fd in (self._buffered, self._direct):
            if fd is not None:
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _CacheRange(ctypes.Structure):
    """``struct cachestat_range`` of Linux 6.5."""

    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    """``struct cachestat``: pages in the cache, and four more counts."""

    _fields_ = (("cached", ctypes.c_uint64), ("rest", ctypes.c_uint64 * 4))


#: The number of the system call ``cachestat``, the same on all architectures.
_CACHESTAT = 451
_cachestat = ctypes.CDLL(None, use_errno=True).syscall if sys.platform == "linux" else None


def _open(path: Path, mode: int) -> tuple[int, int | None]:
    """A file that exists: through the page cache, and past it where the file system has such a way."""
    with reported("open", path):
        buffered = os.open(path, mode | os.O_CLOEXEC)
        try:
            return buffered, _open_direct(path, mode)
        except BaseException:
            os.close(buffered)
            raise


def _open_direct(path: Path, mode: int) -> int | None:
    if not _DIRECT:
        return None
    try:
        return os.open(path, mode | os.O_CLOEXEC | _DIRECT)
    except OSError as error:
        if error.errno in {errno.EINVAL, errno.EOPNOTSUPP}:
            return None
        raise


def _write_all(fd: int | None, data: memoryview, offset: int) -> None:
    if fd is None:
        raise ValueError("the file is closed")
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)
