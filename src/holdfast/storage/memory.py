"""Memory that direct I/O moves bytes from and to."""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress

import numpy as np
import numpy.typing as npt

#: Where the address of a large page begins, and its size, in bytes.
_LARGE = 2 * 2**20

_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)


def aligned_buffer(size: int) -> npt.NDArray[np.uint8]:
    """Zeroed memory for ``size`` bytes that starts on a page; in large pages, where the system has them.

    A disk is told each page by itself: direct I/O of large ones took two thirds of the time (docs/performance.md).
    """
    if size < _LARGE:
        return np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8)[:size]
    # Private, as shared memory has no large pages. What is not touched takes no memory.
    length = (-(-size // _LARGE) + 1) * _LARGE
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if _ADVICE is not None:
        with suppress(OSError):  # a kernel without them
            memory.madvise(_ADVICE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % _LARGE
    return whole[start : start + size]


class Buffers:
    """One aligned buffer for each thread, made when first needed and used again."""

    def __init__(self, size: int) -> None:
        self._size, self._own = size, threading.local()

    def get(self) -> npt.NDArray[np.uint8]:
        """The buffer of the calling thread."""
        if not hasattr(self._own, "buffer"):
            self._own.buffer = aligned_buffer(self._size)
        buffer: npt.NDArray[np.uint8] = self._own.buffer
        return buffer
