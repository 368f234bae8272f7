"""Buffers that saves are copied into. They are kept from save to save: fresh pages would cost more than the copy.

A process stages all its saves here, whatever their path. It keeps as much memory as overlapping saves needed.

:mod:`rankless.save.background` has the memory of a process, and gives each save an :class:`Arena`, which that releases
when it has ended; the memory of a local tier is a subclass (:mod:`rankless.save.tier_stage`).
"""

from __future__ import annotations

import threading

import numpy as np

from rankless.storage.aligned_memory import Bytes, aligned_buffer

#: The most buffers that are kept while no save uses them: a model and its optimizer may be saved at the same time.
_MOST_IDLE = 2

_EMPTY: Bytes = np.empty(0, np.uint8)

#: The bytes that a thread prepares at a time. A save waits for no more than these.
_PREPARED_BYTES = 16 * 2**20

#: The size in bytes of the smallest page.
_PAGE = 4096


class StagingMemory:
    """The staging buffers of a process. Each is used by one save at a time."""

    def __init__(self) -> None:
        self._idle: list[Bytes] = []
        self._prepared: _PreparedBuffer | None = None
        self._is_used = False
        self._lock = threading.Lock()

    def prepare_buffer(self, nbytes: int) -> None:
        """Prepare a buffer for the first save, in a thread: the kernel clears each page at its first use.

        That takes several times as long as the copy. Nothing is prepared after the first save, or if the memory cgroup
        has no room.

        ``RunDirectory.prepare_staging`` calls it before the first asynchronous save, on each rank for itself.
        """
        from rankless.storage.cgroup_memory import free_cgroup_bytes  # noqa: PLC0415 - only asynchronous saves need it

        with self._lock:
            room = free_cgroup_bytes()
            if self._is_used or self._prepared is not None or (room is not None and room < nbytes):
                return
            try:
                self._prepared = _PreparedBuffer(aligned_buffer(nbytes))
            except MemoryError:
                return
            threading.Thread(target=self._prepared.touch_pages, name="rankless-prepare", daemon=True).start()

    def take_buffer(self, nbytes: int) -> Bytes:
        """Return a buffer of at least ``nbytes`` bytes. Its previous content is lost. Raises ``MemoryError``."""
        with self._lock:
            self._is_used = True
            if self._prepared is not None:
                self._idle.append(self._prepared.take())
                self._prepared = None
            large_enough = [buffer for buffer in self._idle if len(buffer) >= nbytes]
            if large_enough:
                return self._remove_idle(min(large_enough, key=len))
            if self._idle:
                self._remove_idle(max(self._idle, key=len))  # free it first: both may not fit into memory
        return aligned_buffer(nbytes)

    def return_buffer(self, buffer: Bytes) -> None:
        """Keep a buffer for the next save, unless there are enough larger ones."""
        with self._lock:
            self._idle = sorted([*self._idle, buffer], key=len)[-_MOST_IDLE:]

    def free_idle(self) -> None:
        """Free the memory that no save uses."""
        with self._lock:
            if self._prepared is not None:
                self._prepared.take()
            self._idle, self._prepared = [], None

    def _remove_idle(self, buffer: Bytes) -> Bytes:
        self._idle = [idle for idle in self._idle if idle is not buffer]
        return buffer


class _PreparedBuffer:
    """A buffer and the thread that touches its pages until a save takes it."""

    def __init__(self, buffer: Bytes) -> None:
        self._buffer, self._is_taken = buffer, False
        self._lock = threading.Lock()

    def touch_pages(self) -> None:
        """Write to each page, unless the buffer is taken."""
        for start in range(0, len(self._buffer), _PREPARED_BYTES):
            with self._lock:
                if self._is_taken:
                    return
                self._buffer[start : start + _PREPARED_BYTES : _PAGE] = 0

    def take(self) -> Bytes:
        """Return the buffer. Nothing writes to it afterwards."""
        with self._lock:
            self._is_taken = True
            return self._buffer


class Arena:
    """The staging memory of one save, allocated when its size is known."""

    def __init__(self, memory: StagingMemory) -> None:
        self._memory, self._buffer = memory, _EMPTY

    def reserve_bytes(self, nbytes: int) -> Bytes:
        """Return ``nbytes`` bytes of memory. Raises ``MemoryError``."""
        self._buffer = self._memory.take_buffer(nbytes)
        return self._buffer[:nbytes]

    def release(self) -> None:
        """Make the memory available to the next save. May be called again."""
        buffer, self._buffer = self._buffer, _EMPTY
        if len(buffer):
            self._memory.return_buffer(buffer)
