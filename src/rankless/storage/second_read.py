"""Second reads: bytes that do not match their checksum are read again, past the page cache, into another buffer.

A bit may flip in the memory of a reader or in the page cache. Only a checkpoint that is wrong on the disk too is
corrupt: a load falls back over it, and a later save hides it. Readers of manifests, headers and small files call
:func:`read_twice_if_wrong`; the verification of blocks reads with :class:`UncachedReader`.

Both happen on the rank that has read; the decision that a block is corrupt is rank 0's or the reading rank's, inside
the vote on the reads. A checkpoint must never be called corrupt after one read.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from rankless.errors import CorruptCheckpointError, UnsafeNameError
from rankless.storage.direct_io import BufferedReader
from rankless.storage.filesystem_kind import forget_names
from rankless.storage.object_path import ObjectPath
from rankless.storage.posix import identify

T = TypeVar("T")

_log = logging.getLogger("rankless")


def read_twice_if_wrong(path: Path, read: Callable[[], T]) -> T:
    """Return the result of ``read``, which reads and checks a small file or a header. Read again if it is corrupt.

    The second result counts, and its ``CorruptCheckpointError`` is raised. A file that another job has replaced or
    added between both reads was not read wrongly: no warning then.
    """
    identity = _identify(path)
    try:
        return read()
    except UnsafeNameError:
        raise
    except CorruptCheckpointError as error:  # which keeps the first buffer, so that the second one is another
        forget_file(path)
        result = read()
        if _identify(path) == identity:
            _log.warning("a first read of %s was wrong, and a second one is right: %s", path, error)
        return result


def _identify(path: Path) -> object:
    """Return an identity that differs between two files of one name; of an object ``None``."""
    return None if isinstance(path, ObjectPath) else identify(path)


def forget_file(path: Path) -> None:
    """Make this host read a file, and its name, from the disk again. It is a hint: not all file systems follow it."""
    if isinstance(path, ObjectPath):  # nothing is remembered
        return
    forget_names(path.parent)
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would block
        try:
            _forget_range(fd, 0, 0)
        finally:
            os.close(fd)


class UncachedReader(BufferedReader):
    """A reader of byte ranges that are not taken from the page cache, if the file system can do without."""

    def read(self, offset: int, into: memoryview) -> None:
        """See :class:`BufferedReader`."""
        start = offset - offset % mmap.PAGESIZE  # the kernel drops whole pages only
        _forget_range(self._fd, start, -(-(offset + len(into) - start) // mmap.PAGESIZE) * mmap.PAGESIZE)
        super().read(offset, into)


def _forget_range(fd: int, offset: int, size: int) -> None:
    """Drop bytes of a file from the page cache; all bytes if ``size`` is 0."""
    if hasattr(os, "posix_fadvise"):  # not on macOS
        with suppress(OSError):  # it is only advice
            os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)
