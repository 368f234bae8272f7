"""Reads of large ranges that read nothing beyond the range, because no other range of the file may be needed here.

On a disk of this machine such reads are direct. On a network file system they go through the page cache without
read-ahead: bytes that a host reads ahead are read again by another host, from one server.

Loads, the reading of shared bytes, conversions and the comparison with a base open files so, on each rank, in reading
threads.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rankless.storage.aligned_memory import BufferPool
from rankless.storage.direct_io import (
    NOT_DIRECT,
    SECTOR_BYTES,
    BufferedReader,
    close_file,
    open_direct,
    truncated_error,
)
from rankless.storage.posix import wrap_os_errors

#: The number of the system call ``cachestat`` (Linux 6.5) on every architecture except Alpha.
_CACHESTAT = 451


class _FileBytes(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Pages(ctypes.Structure):
    """The kernel's ``struct cachestat``: numbers of pages."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently"))


_libc = ctypes.CDLL(None)


def is_cached(fd: int, offset: int, size: int) -> bool:
    """Return whether most of a range is in the page cache; ``True`` if the system cannot report it."""
    pages = _Pages()
    status: int = _libc.syscall(_CACHESTAT, fd, ctypes.byref(_FileBytes(offset, size)), ctypes.byref(pages), 0)
    return bool(status) or int(pages.cached) * mmap.PAGESIZE * 2 > size


#: Smaller ranges, in bytes, are read through the page cache, which reads ahead.
_MIN_BYTES = 2**20

#: The most bytes of one read, if nothing else is said.
_READ_BYTES = 4 * 2**20


class ExactReader(BufferedReader):
    """A reader that reads nothing ahead of large ranges.

    Ranges on a disk go past the page cache if they are not in it, through buffers of large pages. That is faster than
    through the cache (docs/design/decisions.md) and evicts nothing from it.
    """

    def __init__(self, path: Path, buffers: BufferPool, read_bytes: int) -> None:
        super().__init__(path)
        self._buffers, self._read_bytes = buffers, read_bytes
        try:
            with wrap_os_errors("open", path):
                self._is_on_disk = _is_on_disk(self._fd)
                self._large_fd = (open_direct if self._is_on_disk else _open_without_readahead)(path, os.O_RDONLY)
        except BaseException:
            super().close()
            raise

    def read(self, offset: int, into: memoryview) -> None:
        """See :class:`BufferedReader`."""
        if not self._try_read_exactly(offset, into):
            super().read(offset, into)

    def read_in_chunks(self, offset: int, into: memoryview) -> Iterator[memoryview]:
        """See :class:`BufferedReader`."""
        if self._try_read_exactly(offset, into):
            yield into
        else:
            yield from super().read_in_chunks(offset, into)

    def _try_read_exactly(self, offset: int, into: memoryview) -> bool:
        """Fill ``into`` without read-ahead, and return whether it did.

        It does not if the range is small or in the cache, or if the file system has no direct I/O.
        """
        fd, size = self._large_fd, len(into)
        if fd is None or size < _MIN_BYTES or is_cached(fd, offset, size):
            return False
        if not self._is_on_disk:
            self._read_buffered(fd, offset, into)
            return True
        with wrap_os_errors("read", self._path):
            try:
                self._read_direct(fd, offset, np.frombuffer(into, np.uint8))
            except OSError as error:
                if error.errno in NOT_DIRECT:
                    return False
                raise
        return True

    def _read_direct(self, fd: int, offset: int, into: npt.NDArray[np.uint8]) -> None:
        buffer, done = self._buffers.get(), 0
        while done < len(into):
            lead = (offset + done) % SECTOR_BYTES
            size = min(len(into) - done, self._read_bytes)
            sectors = buffer[: -(-(lead + size) // SECTOR_BYTES) * SECTOR_BYTES]
            read = os.preadv(fd, [sectors.data], offset + done - lead) - lead
            if read <= 0:
                raise truncated_error(fd, self._path, offset + done)
            chunk = sectors[lead : lead + min(read, size)]
            np.copyto(into[done : done + len(chunk)], chunk)
            done += len(chunk)

    def close(self) -> None:
        """See :class:`BufferedReader`."""
        fd, self._large_fd = self._large_fd, None
        try:
            close_file(fd, self._path)
        finally:
            super().close()


class ExactReaderFactory:
    """A callable that opens files with :class:`ExactReader`. All its readers share their buffers.

    A read has at most ``read_bytes`` bytes. So has a buffer for each thread.
    """

    def __init__(self, read_bytes: int = _READ_BYTES) -> None:
        self._read_bytes, self._buffers = read_bytes, BufferPool(read_bytes + SECTOR_BYTES)

    def __call__(self, path: Path) -> ExactReader:
        """Open a file."""
        return ExactReader(path, self._buffers, self._read_bytes)


def _open_without_readahead(path: Path, access: int) -> int | None:
    """Open a file a second time, because the kernel notes for each open file whether it may read ahead."""
    if not hasattr(os, "posix_fadvise"):  # macOS
        return None
    fd = os.open(path, access | os.O_CLOEXEC)
    with suppress(OSError):  # it is only advice
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    return fd


def _is_on_disk(fd: int) -> bool:
    """Return whether a file is on a disk of this machine, according to its device number.

    ext4 and XFS report the number of the disk. File systems without a disk report an anonymous number, as do some with
    a disk (Btrfs, ZFS, overlay). Their files are then read through the cache.
    """
    return os.major(os.fstat(fd).st_dev) > 0
