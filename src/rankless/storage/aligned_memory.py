"""Aligned memory for direct I/O.

The buffers of writes, reads, stripes and staging come from here, on each rank. They must begin on a page, or direct I/O
fails.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import numpy.typing as npt

#: A byte array that can be sliced without a copy.
Bytes = npt.NDArray[np.uint8]

#: The size and the alignment of a large page in bytes.
_LARGE_PAGE = 2 * 2**20

_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)

#: Linux's ``MADV_WIPEONFORK``, which Python's ``mmap`` lacks.
_WIPEONFORK = 18 if sys.platform == "linux" else None

_WRITABLE = 0x200  # PyBUF_WRITE

#: ``PyMemoryView_FromMemory``, called with the GIL held.
_view_memory = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)


def memory_at(address: int, size: int) -> memoryview:
    """Return ``size`` writable bytes of memory. The caller keeps their owner alive.

    It takes a quarter of the time of a view of the owner's bytes by torch and NumPy, which small tensors notice.
    """
    view: memoryview = _view_memory(address, size, _WRITABLE)
    return view


def aligned_buffer(size: int) -> Bytes:
    """Return ``size`` bytes of zeroed memory that start on a page; in large pages, if the system has them.

    Direct I/O submits each page separately, and took a third less time with large ones (docs/design/decisions.md).
    A process that is forked later, such as a worker of a data loader, sees zeros. Raises ``MemoryError``.
    """
    if size < _LARGE_PAGE:
        return np.frombuffer(_map_memory(max(size, 1)), np.uint8)[:size]
    memory = _map_memory((-(-size // _LARGE_PAGE) + 1) * _LARGE_PAGE)
    _apply_advice(memory, _HUGEPAGE)
    mapped = np.frombuffer(memory, np.uint8)
    start = -mapped.ctypes.data % _LARGE_PAGE
    return mapped[start : start + size]


def _map_memory(size: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"could not allocate {size} bytes of memory for buffers: {error.strerror}") from error
    # Otherwise each write after a fork would copy its (large) page, as long as the forked process lives.
    _apply_advice(memory, _WIPEONFORK)
    return memory


def _apply_advice(memory: mmap.mmap, advice: int | None) -> None:
    if advice is not None:
        with suppress(OSError):  # a kernel without this advice
            memory.madvise(advice)


class BufferPool:
    """One reusable aligned buffer for each thread, allocated at its first use, and passed to ``prepare`` then."""

    def __init__(self, size: int, prepare: Callable[[Bytes], object] | None = None) -> None:
        self._size, self._prepare, self._by_thread = size, prepare, threading.local()

    def get(self) -> Bytes:
        """Return the buffer of the calling thread."""
        if not hasattr(self._by_thread, "buffer"):
            self._by_thread.buffer = aligned_buffer(self._size)
            if self._prepare is not None:
                self._prepare(self._by_thread.buffer)
        buffer: npt.NDArray[np.uint8] = self._by_thread.buffer
        return buffer
