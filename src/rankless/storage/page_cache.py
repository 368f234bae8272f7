"""Queries and eviction of a file's pages in the page cache."""

from __future__ import annotations

import ctypes
import mmap

#: The number of the system call ``cachestat`` (Linux 6.5) on every architecture except Alpha.
_CACHESTAT = 451


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Pages(ctypes.Structure):
    """The kernel's ``struct cachestat``: numbers of pages."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently"))


_libc = ctypes.CDLL(None)


def is_cached(fd: int, offset: int, size: int) -> bool:
    """Return whether most of a range is in the page cache; ``True`` if the system cannot report it."""
    pages = _Pages()
    status: int = _libc.syscall(_CACHESTAT, fd, ctypes.byref(_Range(offset, size)), ctypes.byref(pages), 0)
    return bool(status) or int(pages.cached) * mmap.PAGESIZE * 2 > size
