"""Large data: direct writes into parts of a file, and positioned reads.

``O_DIRECT`` moves whole sectors from aligned memory past the page cache. What is not whole sectors (the
first and last of a range) is written through the cache; two writers may share a sector only on one host.
"""

from __future__ import annotations

import errno
import os
import threading
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path

from holdfast.errors import CorruptCheckpointError
from holdfast.storage.closing import ClosingMixin
from holdfast.storage.fork_safety import ClosedInForks
from holdfast.storage.posix import wrap_os_errors

#: Offsets, lengths and addresses of direct I/O are multiples of this, in bytes: a page, and at least a sector.
SECTOR_BYTES = 4096

#: Bytes that go into the page cache at once. More are kept in larger pages, of which a virtual machine whose host takes
#: free memory back has none at hand: that was four times slower (measured).
_CACHED = 128 * 2**10

#: Bytes read out of the page cache at once where each part is looked at: it is in the processor's cache then.
_PART = 2**20

#: Beginnings and ends of ranges, each shorter than a sector, that wait to be written at once.
_EDGES = 512

#: What file systems say that have no direct I/O, at all or for such a file or range.
NOT_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP})

#: In place of the number of a file that has been closed.
_CLOSED = -1

_DIRECT = getattr(os, "O_DIRECT", 0)


class FileWriter(ClosingMixin, ClosedInForks):
    """Writes byte ranges into a file that exists. What was not synced when it is closed may be lost."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path, self._cached = path, _CLOSED
        with wrap_os_errors("open", path):
            self._cached = os.open(path, os.O_WRONLY | os.O_CLOEXEC)

    @abstractmethod
    def write(self, offset: int, data: memoryview) -> None:
        """Write ``data`` at ``offset`` bytes. Safe to call from several threads for ranges that do not overlap."""

    def _write_cached(self, data: memoryview, offset: int) -> None:
        for start in range(0, len(data), _CACHED):
            _write_all(self._cached, data[start : start + _CACHED], offset + start)

    def sync(self) -> None:
        """Make everything written so far durable."""
        with wrap_os_errors("sync", self._path):
            os.fsync(self._cached)

    def close(self) -> None:
        """Close the file; not a sync."""
        # Numbers of closed files are given to others: nothing must be written to them.
        fd, self._cached = self._cached, _CLOSED
        close_file(fd, self._path)

    def close_in_fork(self) -> None:
        """See :class:`ClosedInForks`."""
        self.close()


class BufferedWriter(FileWriter):
    """Through the page cache, where what is read back soon is still there; memory of any address will do."""

    def write(self, offset: int, data: memoryview) -> None:
        """See :class:`FileWriter`."""
        with wrap_os_errors("write", self._path):
            self._write_cached(data, offset)


class DirectWriter(FileWriter):
    """Directly, where the file system can. The address of ``data`` modulo :data:`SECTOR_BYTES` must be that of ``offset``.

    The bytes before and after whole sectors wait for :meth:`sync`, some hundreds of them at most: each write through
    the cache waits until all direct ones of all processes are done, and keeps new ones waiting.
    """

    def __init__(self, path: Path) -> None:
        self._edges: list[tuple[int, bytes]] = []
        self._lock = threading.Lock()
        self._direct: int | None = None
        super().__init__(path)
        try:
            with wrap_os_errors("open", path):
                self._direct = open_direct(path, os.O_WRONLY)
        except BaseException:
            super().close()
            raise

    def write(self, offset: int, data: memoryview) -> None:
        """See :class:`FileWriter`."""
        first = min(-offset % SECTOR_BYTES, len(data))
        last = first + (len(data) - first) // SECTOR_BYTES * SECTOR_BYTES
        with wrap_os_errors("write", self._path):
            if self._direct is None:
                self._write_cached(data, offset)
                return
            self._write_direct(self._direct, data[first:last], offset + first)
            self._put_off([(offset, data[:first]), (offset + last, data[last:])])

    def _write_direct(self, fd: int, data: memoryview, offset: int) -> None:
        try:
            _write_all(fd, data, offset)
        except OSError as error:
            if error.errno not in NOT_DIRECT:
                raise
            self._write_cached(data, offset)

    def _put_off(self, edges: Iterable[tuple[int, memoryview]]) -> None:
        with self._lock:
            self._edges += [(offset, bytes(data)) for offset, data in edges if data]
            if len(self._edges) < _EDGES:
                return
            due, self._edges = self._edges, []
        self._write_edges(due)

    def _write_edges(self, edges: Iterable[tuple[int, bytes]]) -> None:
        for offset, data in edges:
            _write_all(self._cached, memoryview(data), offset)

    def sync(self) -> None:
        """See :class:`FileWriter`."""
        with wrap_os_errors("write", self._path):
            due, self._edges = self._edges, []
            self._write_edges(due)
        super().sync()

    def close(self) -> None:
        """See :class:`FileWriter`."""
        fd, self._direct = self._direct, None
        try:
            close_file(fd, self._path)
        finally:
            super().close()


class BufferedReader(ClosingMixin):
    """Reads byte ranges of a file, through the page cache."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with wrap_os_errors("open", path):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` from ``offset`` bytes on. Raises ``CorruptCheckpointError`` where the file ends before.

        Safe to call from several threads.
        """
        self._read_cached(offset, into)

    def read_in_parts(self, offset: int, into: memoryview) -> Iterator[memoryview]:
        """Fill ``into`` as :meth:`read` does, and give each part of it, in order, when it has just been filled."""
        for start in range(0, len(into), _PART):
            part = into[start : start + _PART]
            self._read_cached(offset + start, part)
            yield part

    def _read_cached(self, offset: int, into: memoryview) -> None:
        with wrap_os_errors("read", self._path):
            done = 0
            while done < len(into):
                n = os.preadv(self._fd, [into[done:]], offset + done)
                if n == 0:
                    raise CorruptCheckpointError(
                        f"{self._path} ends at byte {offset + done}, inside its data: it was cut short"
                    )
                done += n

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, _CLOSED
        close_file(fd, self._path)


def open_direct(path: Path, access: int) -> int | None:
    """A file that exists, past the page cache, where the file system has such a way. ``access`` is as for ``open``."""
    if not _DIRECT:
        return None
    try:
        return os.open(path, access | os.O_CLOEXEC | _DIRECT)
    except OSError as error:
        if error.errno in NOT_DIRECT:
            return None
        raise


def close_file(fd: int | None, path: Path) -> None:
    """Close a file that is open."""
    if fd is not None and fd != _CLOSED:
        with wrap_os_errors("close", path):
            os.close(fd)


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        written = os.pwrite(fd, data[done:], offset + done)
        if not written:
            raise OSError(errno.EIO, "nothing is written")
        done += written
