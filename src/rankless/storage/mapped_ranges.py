"""Ranges of files in the page cache, mapped instead of copied: for readers that need a part of a range.

A load from a mapping kills the process (``SIGBUS``) if the page cannot be read. So the pages of a range are read and
mapped before the range is used, by ``MADV_POPULATE_READ``, which reports such an error instead.

:mod:`rankless.engine.io.read_mapped` has one for each call, for the loader of weights of engines.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np

from rankless.errors import CorruptCheckpointError
from rankless.storage.aligned_memory import Bytes
from rankless.storage.closing import ClosingMixin
from rankless.storage.object_path import ObjectPath
from rankless.storage.posix import wrap_os_errors

#: ``MADV_POPULATE_READ`` of Linux 5.14, which Python's ``mmap`` lacks.
_POPULATE_READ = 22

#: The errors of kernels and file systems that cannot do this.
_NOT_MAPPED = frozenset({errno.EINVAL, errno.ENODEV, errno.EPERM, errno.EACCES, errno.ENOSYS, errno.ENOMEM})

_WILLNEED = getattr(os, "POSIX_FADV_WILLNEED", None)


class MappedRanges(ClosingMixin):
    """The mappings of some files, safe to use from several threads."""

    def __init__(self) -> None:
        self._mappings: dict[Path, _Mapping | None] = {}
        self._lock = threading.Lock()

    def map_range(self, path: Path, offset: int, size: int) -> Bytes | None:
        """Return bytes of a file. They must not be changed. ``None`` if the file cannot be mapped: it must be read.

        Raises ``CorruptCheckpointError`` if the file ends before, ``StorageError`` if a page cannot be read.
        """
        with self._lock:
            if path not in self._mappings:
                self._mappings[path] = None if isinstance(path, ObjectPath) else _map_file(path)
            mapping = self._mappings[path]
        return None if mapping is None else mapping.populate(offset, size)

    def close(self) -> None:
        """Close all files. Bytes that were returned stay valid as long as they are referenced."""
        mappings, self._mappings = self._mappings, {}
        for mapping in mappings.values():
            if mapping is not None:
                mapping.close()


class _Mapping:
    def __init__(self, path: Path, fd: int, memory: mmap.mmap) -> None:
        self._path, self._fd, self._memory = path, fd, memory
        self._bytes = np.frombuffer(memory, np.uint8)

    def populate(self, offset: int, size: int) -> Bytes | None:
        if offset + size > len(self._bytes):
            raise CorruptCheckpointError(
                f"{self._path} ends at byte {len(self._bytes)}, inside its data: it is truncated"
            )
        first = offset - offset % mmap.PAGESIZE
        with wrap_os_errors("read", self._path):
            if _WILLNEED is not None:
                with suppress(OSError):  # a file system may refuse advice
                    os.posix_fadvise(self._fd, first, offset + size - first, _WILLNEED)
            try:
                self._memory.madvise(_POPULATE_READ, first, offset + size - first)
            except OSError as error:
                if error.errno in _NOT_MAPPED:
                    return None
                # EFAULT stands for the error that a read of the page has.
                raise OSError(errno.EIO, os.strerror(errno.EIO)) from error
        return self._bytes[offset : offset + size]

    def close(self) -> None:
        os.close(self._fd)


def _map_file(path: Path) -> _Mapping | None:
    with wrap_os_errors("open", path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would block
        try:
            # A private mapping: torch wants writable memory, and nothing is written to it.
            memory = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
            memory.madvise(mmap.MADV_RANDOM)  # no other range is read ahead
            return _Mapping(path, fd, memory)
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            os.close(fd)
            if isinstance(error, ValueError) or error.errno in _NOT_MAPPED:
                return None
            raise
