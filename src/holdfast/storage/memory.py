"""Memory that direct I/O moves bytes from and to."""

from __future__ import annotations

import mmap
import sys
import threading
from contextlib import suppress

import numpy as np
import numpy.typing as npt

#: Bytes, as memory that can be sliced without a copy.
Bytes = npt.NDArray[np.uint8]

#: Where the address of a large page begins, and its size, in bytes.
_LARGE = 2 * 2**20

_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)

#: Linux's ``MADV_WIPEONFORK``, which Python has no name for.
_WIPEONFORK = 18 if sys.platform == "linux" else None


def aligned_buffer(size: int) -> Bytes:
    """Zeroed memory for ``size`` bytes that starts on a page; in large pages, where the system has them.

    A disk is told each page by itself: direct I/O of large ones took two thirds of the time (docs/performance.md).
    A process that is forked later, as a worker of a data loader, finds zeros in it. Raises ``MemoryError``.
    """
    if size < _LARGE:
        return np.frombuffer(_memory(max(size, 1)), np.uint8)[:size]
    memory = _memory((-(-size // _LARGE) + 1) * _LARGE)
    _advise(memory, _HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % _LARGE
    return whole[start : start + size]


def _memory(size: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes of memory for buffers cannot be had: {error.strerror}") from error
    # Else what is written after a fork would be copied, large pages and all, as long as the other process lives.
    _advise(memory, _WIPEONFORK)
    return memory


def _advise(memory: mmap.mmap, advice: int | None) -> None:
    if advice is not None:
        with suppress(OSError):  # a kernel that does not know it
            memory.madvise(advice)


class BufferPool:
    """One aligned buffer for each thread, made when first needed and used again."""

    def __init__(self, size: int) -> None:
        self._size, self._own = size, threading.local()

    def get(self) -> Bytes:
        """The buffer of the calling thread."""
        if not hasattr(self._own, "buffer"):
            self._own.buffer = aligned_buffer(self._size)
        buffer: npt.NDArray[np.uint8] = self._own.buffer
        return buffer
