"""Large data: direct writes into parts of a file, and positioned reads.

``O_DIRECT`` moves whole sectors from aligned memory past the page cache. What is not whole sectors (the
first and last of a range) is written through the cache; two writers may share a sector only on one host.
"""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import ExitStack
from pathlib import Path

from holdfast.errors import DamagedError
from holdfast.storage.closing import Closing
from holdfast.storage.local import reported

#: Offsets, lengths and addresses of direct I/O are multiples of this, in bytes: a page, and at least a sector.
SECTOR = 4096

#: Bytes that go into the page cache at once. More are kept in larger pages, of which a virtual machine whose host takes
#: free memory back has none at hand: that was four times slower (measured).
_CACHED = 128 * 2**10

_DIRECT = getattr(os, "O_DIRECT", 0)


def aligned_buffer(size: int) -> memoryview:
    """Zeroed memory for ``size`` bytes that starts on a page."""
    # Shared, as mmap has it: direct writes out of private pages were a tenth slower.
    return memoryview(mmap.mmap(-1, size))


class BulkWriter(Closing):
    """Writes byte ranges into a file that exists, directly where the file system can."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._buffered, self._direct = _open(path)

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
        files = [fd for fd in (self._buffered, self._direct) if fd is not None]
        # Numbers of closed files are given to others: nothing must be written to them.
        self._buffered, self._direct = -1, None
        with reported("close", self._path), ExitStack() as stack:
            for fd in files:
                stack.callback(os.close, fd)


class CachedWriter(BulkWriter):
    """Writes through the page cache, where what is read back soon is still there; memory of any address will do."""

    def __init__(self, path: Path) -> None:
        self._path, self._direct = path, None
        with reported("open", path):
            self._buffered = os.open(path, os.O_WRONLY | os.O_CLOEXEC)

    def write(self, offset: int, data: memoryview) -> None:
        """Write ``data`` at ``offset`` bytes. Safe to call from several threads for ranges that do not overlap."""
        with reported("write", self._path):
            for start in range(0, len(data), _CACHED):
                _write_all(self._buffered, data[start : start + _CACHED], offset + start)


class BulkReader(Closing):
    """Reads byte ranges of a file, through the page cache."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with reported("open", path):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` from ``offset`` bytes on. Raises ``DamagedError`` where the file ends before.

        Safe to call from several threads.
        """
        with reported("read", self._path):
            done = 0
            while done < len(into):
                n = os.preadv(self._fd, [into[done:]], offset + done)
                if n == 0:
                    raise DamagedError(f"{self._path} ends at byte {offset + done}, inside its data: it was cut short")
                done += n

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, -1
        with reported("close", self._path):
            os.close(fd)


def _open(path: Path) -> tuple[int, int | None]:
    """A file that exists: through the page cache, and past it where the file system has such a way."""
    with reported("open", path):
        buffered = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            return buffered, _open_direct(path)
        except BaseException:
            os.close(buffered)
            raise


def _open_direct(path: Path) -> int | None:
    if not _DIRECT:
        return None
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | _DIRECT)
    except OSError as error:
        if error.errno in {errno.EINVAL, errno.EOPNOTSUPP}:
            return None
        raise


def _write_all(fd: int | None, data: memoryview, offset: int) -> None:
    if fd is None:
        raise ValueError("the file is closed")
    done = 0
    while done < len(data):
        written = os.pwrite(fd, data[done:], offset + done)
        if not written:
            raise OSError(errno.EIO, "nothing is written")
        done += written
