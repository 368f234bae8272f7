"""How much of a file is in the page cache."""

from __future__ import annotations

import ctypes
import mmap

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
