"""Direct and buffered I/O on byte ranges of large files.

``O_DIRECT`` moves whole sectors between aligned memory and the disk, past the page cache. The first and last bytes
of a range, which are not whole sectors, are written through the cache. Two writers may share a sector only on one host.

:mod:`rankless.engine.io.write` writes with :class:`DirectWriter` on each rank, in several threads;
:class:`BufferedReader` is the reader of all files of file systems, unless a caller passes another one. Ranges of two
threads must not overlap.
"""

from __future__ import annotations

import errno
import os
import threading
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path

from rankless.errors import CorruptCheckpointError
from rankless.storage.closing import ClosingMixin
from rankless.storage.filesystem_kind import is_in_memory
from rankless.storage.fork_safety import ClosedInForks
from rankless.storage.posix import describe_version, start_writeback, wrap_os_errors, write_fully

#: Offsets, lengths and addresses of direct I/O are multiples of this, in bytes: a page, and at least a sector.
SECTOR_BYTES = 4096

#: The most bytes of one write through the page cache. The kernel keeps larger writes in larger pages. A virtual machine
#: has none of these at hand if its host reclaims free memory, which was four times slower (measured).
_BUFFERED_BYTES = 128 * 2**10

#: The bytes of a chunk of :meth:`BufferedReader.read_in_chunks`: a chunk is still in the processor's cache when it is
#: used.
_CHUNK_BYTES = 2**20

#: The most edges (starts and ends of ranges, each shorter than a sector) that wait to be written together.
_MAX_EDGES = 512

#: The errors of file systems without direct I/O, in general or for this file or range.
NOT_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP})

#: The file descriptor of a closed file.
_CLOSED = -1

_DIRECT = getattr(os, "O_DIRECT", 0)


class FileWriter(ClosingMixin, ClosedInForks):
    """A writer of byte ranges into an existing file. Bytes that were not synced before it is closed may be lost."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path, self._buffered_fd = path, _CLOSED
        with wrap_os_errors("open", path):
            self._buffered_fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)

    @property
    def copies_bytes(self) -> bool:
        """True if the kernel copies all bytes that are written, so that they may be at any address."""
        return True

    @abstractmethod
    def write(self, offset: int, data: memoryview) -> None:
        """Write ``data`` at ``offset`` bytes. Safe to call from several threads for ranges that do not overlap."""

    def _write_buffered(self, data: memoryview, offset: int) -> None:
        for start in range(0, len(data), _BUFFERED_BYTES):
            write_fully(self._buffered_fd, data[start : start + _BUFFERED_BYTES], offset + start)

    def flush(self) -> None:
        """Pass everything written so far to the file system: a later sync of the file makes it durable."""

    def start_writeback(self) -> None:
        """Let the kernel begin to write bytes to the disk that were written through the page cache."""
        with wrap_os_errors("write", self._path):
            start_writeback(self._buffered_fd)

    def sync(self) -> None:
        """Make everything written so far durable."""
        self.flush()
        with wrap_os_errors("sync", self._path):
            os.fsync(self._buffered_fd)

    def close(self) -> None:
        """Close the file, without a sync."""
        # The kernel reuses the descriptors of closed files: nothing must be written to them.
        fd, self._buffered_fd = self._buffered_fd, _CLOSED
        close_file(fd, self._path)

    def close_in_fork(self) -> None:
        """See :class:`ClosedInForks`."""
        self.close()


class BufferedWriter(FileWriter):
    """A writer through the page cache, for bytes that are read back soon. It takes memory at any address."""

    def write(self, offset: int, data: memoryview) -> None:
        """See :class:`FileWriter`."""
        with wrap_os_errors("write", self._path):
            self._write_buffered(data, offset)


class DirectWriter(FileWriter):
    """A writer past the page cache, if the file system supports it.

    The address of ``data`` and ``offset`` must be equal modulo :data:`SECTOR_BYTES`. Edges (bytes before and after
    whole sectors) are written by :meth:`flush`, or when there are some hundreds: each write through the cache waits for
    all direct writes of all processes to the file, and delays new ones.
    """

    def __init__(self, path: Path) -> None:
        self._edges: list[tuple[int, bytes]] = []
        self._lock = threading.Lock()
        self._direct_fd: int | None = None
        super().__init__(path)
        try:
            with wrap_os_errors("open", path):
                # Files in memory can be opened for direct writes, too, which are copied like all others.
                self._direct_fd = None if is_in_memory(path) else open_direct(path, os.O_WRONLY)
        except BaseException:
            super().close()
            raise

    @property
    def copies_bytes(self) -> bool:
        """See :class:`FileWriter`."""
        return self._direct_fd is None

    def write(self, offset: int, data: memoryview) -> None:
        """See :class:`FileWriter`."""
        first = min(-offset % SECTOR_BYTES, len(data))
        last = first + (len(data) - first) // SECTOR_BYTES * SECTOR_BYTES
        with wrap_os_errors("write", self._path):
            if self._direct_fd is None:
                self._write_buffered(data, offset)
                return
            self._write_direct(self._direct_fd, data[first:last], offset + first)
            self._defer_edges([(offset, data[:first]), (offset + last, data[last:])])

    def _write_direct(self, fd: int, data: memoryview, offset: int) -> None:
        try:
            write_fully(fd, data, offset)
        except OSError as error:
            if error.errno not in NOT_DIRECT:
                raise
            self._write_buffered(data, offset)

    def _defer_edges(self, edges: Iterable[tuple[int, memoryview]]) -> None:
        with self._lock:
            self._edges += [(offset, bytes(data)) for offset, data in edges if data]
            if len(self._edges) < _MAX_EDGES:
                return
            edges_to_write, self._edges = self._edges, []
        self._write_edges(edges_to_write)

    def _write_edges(self, edges: Iterable[tuple[int, bytes]]) -> None:
        for offset, data in edges:
            write_fully(self._buffered_fd, memoryview(data), offset)

    def flush(self) -> None:
        """See :class:`FileWriter`."""
        with wrap_os_errors("write", self._path):
            edges_to_write, self._edges = self._edges, []
            self._write_edges(edges_to_write)

    def close(self) -> None:
        """See :class:`FileWriter`."""
        fd, self._direct_fd = self._direct_fd, None
        try:
            close_file(fd, self._path)
        finally:
            super().close()


class BufferedReader(ClosingMixin):
    """A reader of byte ranges of a file, through the page cache."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with wrap_os_errors("open", path):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would block

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        with wrap_os_errors("inspect", self._path):
            return os.fstat(self._fd).st_size

    @property
    def version(self) -> str:
        """See :class:`~rankless.storage.store.RangeReader`."""
        with wrap_os_errors("inspect", self._path):
            return describe_version(os.fstat(self._fd))

    def read(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` from byte ``offset`` on. Raises ``CorruptCheckpointError`` if the file ends before.

        Safe to call from several threads.
        """
        self._read_buffered(self._fd, offset, into)

    def read_in_chunks(self, offset: int, into: memoryview) -> Iterator[memoryview]:
        """Fill ``into`` as :meth:`read` does, and yield each chunk of it, in order, right after it was filled."""
        for start in range(0, len(into), _CHUNK_BYTES):
            chunk = into[start : start + _CHUNK_BYTES]
            self._read_buffered(self._fd, offset + start, chunk)
            yield chunk

    def _read_buffered(self, fd: int, offset: int, into: memoryview) -> None:
        with wrap_os_errors("read", self._path):
            done = 0
            while done < len(into):
                n = os.preadv(fd, [into[done:]], offset + done)
                if n == 0:
                    raise truncated_error(fd, self._path, offset + done)
                done += n

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, _CLOSED
        close_file(fd, self._path)


def truncated_error(fd: int, path: Path, offset: int) -> CorruptCheckpointError:
    """Return the error of a read that got no bytes. Raises ``OSError`` if the file has some there nevertheless."""
    if os.fstat(fd).st_size > offset:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return CorruptCheckpointError(f"{path} ends at byte {offset}, inside its data: it is truncated")


def open_direct(path: Path, access: int) -> int | None:
    """Open an existing file for direct I/O. Return ``None`` if the file system does not support it.

    ``access`` is a flag of ``os.open``.
    """
    if not _DIRECT:
        return None
    try:
        return os.open(path, access | os.O_CLOEXEC | _DIRECT)
    except OSError as error:
        if error.errno in NOT_DIRECT:
            return None
        raise


def close_file(fd: int | None, path: Path) -> None:
    """Close a file, if it is open."""
    if fd is not None and fd != _CLOSED:
        with wrap_os_errors("close", path):
            os.close(fd)
