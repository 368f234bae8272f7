"""Destinations of bytes that are read, other than tensors. Reading a checkpoint with these needs no torch.

The view of a checkpoint, the commands and verifications read into them, in one process; loads fill tensors instead
(:mod:`rankless.engine.io.tensor_bytes`). So this module must not import torch.
"""

from __future__ import annotations

from typing import Protocol

from rankless.storage.aligned_memory import Bytes


class ByteSink(Protocol):
    """A destination of bytes that are read."""

    def view(self, start: int, stop: int) -> Bytes | None:
        """Return the memory of bytes ``[start, stop)``; ``None`` if they must be passed to :meth:`write`."""

    def write(self, start: int, data: Bytes) -> None:
        """Store the bytes from ``start`` on."""


class NullSink:
    """A sink for bytes that are only hashed."""

    def view(self, start: int, stop: int) -> Bytes | None:
        """Return ``None``: there is no memory."""
        del start, stop
        return None

    def write(self, start: int, data: Bytes) -> None:
        """Discard the bytes."""


class MemorySink:
    """A sink for bytes that are read into plain memory."""

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory

    def view(self, start: int, stop: int) -> Bytes:
        """See :class:`ByteSink`."""
        return self._memory[start:stop]

    def write(self, start: int, data: Bytes) -> None:
        """See :class:`ByteSink`."""
        self._memory[start : start + len(data)] = data
