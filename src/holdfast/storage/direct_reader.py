"""Reading past the page cache what is not in it: from a disk of this machine, and for one reader."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from holdfast.errors import CorruptCheckpointError
from holdfast.storage.direct_io import NOT_DIRECT, SECTOR_BYTES, BufferedReader, close_file, open_direct
from holdfast.storage.memory import BufferPool
from holdfast.storage.page_cache import is_cached
from holdfast.storage.posix import wrap_os_errors

#: Ranges below this many bytes are read through the page cache, which reads ahead.
_LEAST = 2**20

#: Bytes read at a time.
_MOST = 4 * 2**20


class DirectReader(BufferedReader):
    """Reads as :class:`BufferedReader` does; large ranges that are not in the page cache, past it.

    Bytes go through buffers of large pages: faster than through the cache (docs/performance.md), which keeps what
    else is in it. File systems of a network, which have no disk here, are read through the cache as ever.
    """

    def __init__(self, path: Path, buffers: BufferPool) -> None:
        super().__init__(path)
        self._buffers = buffers
        try:
            with wrap_os_errors("open", path):
                self._direct = open_direct(path, os.O_RDONLY) if _is_on_disk(self._fd) else None
        except BaseException:
            super().close()
            raise

    def read(self, offset: int, into: memoryview) -> None:
        """See :class:`BufferedReader`."""
        if not self._has_read(offset, into):
            super().read(offset, into)

    def read_in_parts(self, offset: int, into: memoryview) -> Iterator[memoryview]:
        """See :class:`BufferedReader`."""
        if self._has_read(offset, into):
            yield into
        else:
            yield from super().read_in_parts(offset, into)

    def _has_read(self, offset: int, into: memoryview) -> bool:
        """Read past the page cache. Returns whether that is for such a range, and the file system could."""
        fd, size = self._direct, len(into)
        if fd is None or size < _LEAST or is_cached(fd, offset, size):
            return False
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
            size = min(len(into) - done, _MOST)
            sectors = buffer[: -(-(lead + size) // SECTOR_BYTES) * SECTOR_BYTES]
            read = os.preadv(fd, [sectors.data], offset + done - lead) - lead
            if read <= 0:
                raise CorruptCheckpointError(
                    f"{self._path} ends at byte {offset + done}, inside its data: it was cut short"
                )
            taken = sectors[lead : lead + min(read, size)]
            np.copyto(into[done : done + len(taken)], taken)
            done += len(taken)

    def close(self) -> None:
        """See :class:`BufferedReader`."""
        fd, self._direct = self._direct, None
        try:
            close_file(fd, self._path)
        finally:
            super().close()


class DirectFile:
    """Opens files to be read so, with buffers that all of them share."""

    def __init__(self) -> None:
        self._buffers = BufferPool(_MOST + SECTOR_BYTES)

    def __call__(self, path: Path) -> DirectReader:
        """Open a file."""
        return DirectReader(path, self._buffers)


def _is_on_disk(fd: int) -> bool:
    """Whether a file is on a disk of this machine, as its device's number tells: ext4 and XFS have the disk's.

    Those without a disk have a number that means nothing, and so have some that are on one (Btrfs, ZFS, overlays).
    """
    return os.major(os.fstat(fd).st_dev) > 0
