"""How much of a file is in the page cache, and how it gets out of it."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

from holdfast.storage.posix import wrap_os_errors

#: ``cachestat``, of Linux 6.5: on every processor but Alpha it has this number.
_CACHESTAT = 451


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Pages(ctypes.Structure):
    """Numbers of pages, as the kernel's ``struct cachestat`` has them."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently"))


_libc = ctypes.CDLL(None)


def is_cached(fd: int, offset: int, size: int) -> bool:
    """Whether most of a range is in the page cache. So it is taken to be where the system cannot tell."""
    pages = _Pages()
    failed: int = _libc.syscall(_CACHESTAT, fd, ctypes.byref(_Range(offset, size)), ctypes.byref(pages), 0)
    return bool(failed) or int(pages.cached) * mmap.PAGESIZE * 2 > size


def drop_cache(path: Path) -> None:
    """Have the next reads of a file come from its file system. What is not synced yet stays in the cache."""
    with wrap_os_errors("read", path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
