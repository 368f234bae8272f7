"""Memory for the file ranges that a load reads: the tensors themselves, or one buffer for each thread.

Tensors on accelerators need pinned buffers: :mod:`rankless.engine.io.device_read_buffers`.

:mod:`rankless.engine.io.read` opens one for each call, and its threads share it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Protocol, Self

from rankless.engine.io.requests import SinkOf
from rankless.engine.plan.file_ranges import FileRange
from rankless.storage.aligned_memory import BufferPool, Bytes


class ReadBuffers(Protocol):
    """The tensors of a load, and the buffers on the way to them, inside a ``with`` block.

    When the block ends, all bytes are in the tensors.
    """

    def view(self, file_range: FileRange) -> Bytes | None:
        """Return the memory of a range of a tensor, or ``None`` if its bytes must be read into a buffer."""

    def take_buffer(self) -> AbstractContextManager[Bytes]:
        """Return a buffer for use inside the ``with`` block."""

    def write(self, tensor: int, local: int, data: Bytes) -> None:
        """Put bytes into a tensor from offset ``local`` of this rank's shard on. ``data`` is a part of a buffer."""

    def __enter__(self) -> Self:
        """Begin the load."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the load."""


class HostReadBuffers:
    """The :class:`ReadBuffers` of sinks in the memory of the host."""

    def __init__(self, sink_of: SinkOf, nbytes: int) -> None:
        self._sink_of, self._by_thread = sink_of, BufferPool(nbytes)

    def view(self, file_range: FileRange) -> Bytes | None:
        """See :class:`ReadBuffers`."""
        return view_range(self._sink_of, file_range)

    @contextmanager
    def take_buffer(self) -> Iterator[Bytes]:
        """See :class:`ReadBuffers`."""
        yield self._by_thread.get()

    def write(self, tensor: int, local: int, data: Bytes) -> None:
        """See :class:`ReadBuffers`."""
        self._sink_of(tensor).write(local, data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: each write is complete when it returns."""


def view_range(sink_of: SinkOf, file_range: FileRange) -> Bytes | None:
    """Return the memory of a range of a tensor, or ``None`` if it has none that can be read into."""
    stop = file_range.local + file_range.stop - file_range.start
    return sink_of(file_range.tensor).view(file_range.local, stop)
