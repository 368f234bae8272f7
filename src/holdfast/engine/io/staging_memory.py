"""Memory that saves are copied into. It is kept from save to save: fresh pages would cost more than the copy.

One process stages all its saves here, whatever their path: it keeps as much as the saves that overlapped needed.
"""

from __future__ import annotations

import threading

import numpy as np

from holdfast.storage.memory import Bytes, aligned_buffer

#: Most buffers that are kept while no save uses them: a model and its optimizer may be saved side by side.
_MOST_IDLE = 2

_NOTHING: Bytes = np.empty(0, np.uint8)


class StagingMemory:
    """The buffers of a process. Each is used by one save at a time."""

    def __init__(self) -> None:
        self._idle: list[Bytes] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Bytes:
        """Return a buffer of at least ``nbytes`` bytes. What was in it before is lost. Raises ``MemoryError``."""
        with self._lock:
            large_enough = [buffer for buffer in self._idle if len(buffer) >= nbytes]
            if large_enough:
                return self._remove(min(large_enough, key=len))
            if self._idle:
                self._remove(max(self._idle, key=len))  # let go of it first: both may not fit into memory
        return aligned_buffer(nbytes)

    def give_back(self, buffer: Bytes) -> None:
        """Keep a buffer for the next save, unless there are larger ones enough."""
        with self._lock:
            self._idle = sorted([*self._idle, buffer], key=len)[-_MOST_IDLE:]

    def free_idle(self) -> None:
        """Give memory that no save uses back to the system."""
        with self._lock:
            self._idle = []

    def _remove(self, buffer: Bytes) -> Bytes:
        self._idle = [idle for idle in self._idle if idle is not buffer]
        return buffer


class Arena:
    """The staging memory of one save, taken when its size is known."""

    def __init__(self, memory: StagingMemory) -> None:
        self._memory, self._buffer = memory, _NOTHING

    def room(self, nbytes: int) -> Bytes:
        """Return ``nbytes`` bytes of memory. Raises ``MemoryError``."""
        self._buffer = self._memory.take(nbytes)
        return self._buffer[:nbytes]

    def release(self) -> None:
        """Let the next save have the memory. May be called again."""
        buffer, self._buffer = self._buffer, _NOTHING
        if len(buffer):
            self._memory.give_back(buffer)
