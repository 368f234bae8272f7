"""Pinned memory for file ranges of tensors on accelerators that a load reads.

There are more buffers than threads, and they are pinned: while the device copies out of some, threads read into others.
A buffer is used again when the copies out of it are done.

:mod:`rankless.engine.io.read` uses it in the thread of the caller and its reading threads, inside the vote "reading".
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

from rankless.engine.io.copies_from_device import CopyMark
from rankless.engine.io.device_streams import CopyStream, wait_for_copies
from rankless.engine.io.pinned_memory import pin_for
from rankless.engine.io.read_buffers import view_range
from rankless.engine.io.requests import SinkOf
from rankless.engine.io.tensor_bytes import TensorBytes
from rankless.engine.plan.file_ranges import FileRange
from rankless.errors import DeviceError
from rankless.storage.aligned_memory import Bytes, aligned_buffer

#: The most bytes of pinned buffers.
_MOST_PINNED = 240 * 2**20

#: The number of buffers for each thread.
_BUFFERS_A_THREAD = 2


class DeviceReadBuffers:
    """The :class:`~rankless.engine.io.read_buffers.ReadBuffers` of a load into accelerators, with their ``streams``."""

    def __init__(self, sink_of: SinkOf, nbytes: int, threads: int, streams: Sequence[CopyStream]) -> None:
        self._sink_of, self._streams = sink_of, {stream.device: stream for stream in streams}
        #: The pinned buffers that no thread uses, each with the copies out of it. The oldest copies are done soonest.
        self._pinned: queue.SimpleQueue[tuple[Bytes, CopyMark]] = queue.SimpleQueue()
        count = min(_BUFFERS_A_THREAD * threads, _MOST_PINNED // nbytes)
        memory = pin_for(streams, aligned_buffer(count * nbytes))
        for start in range(0, count * nbytes, nbytes):
            self._pinned.put((memory[start : start + nbytes], CopyMark(())))

    def view(self, file_range: FileRange) -> Bytes | None:
        """See :class:`rankless.engine.io.read_buffers.ReadBuffers`."""
        return view_range(self._sink_of, file_range)

    @contextmanager
    def take_buffer(self) -> Iterator[Bytes]:
        """See :class:`rankless.engine.io.read_buffers.ReadBuffers`."""
        buffer, copies = self._pinned.get()
        try:
            copies.wait()
            yield buffer
        finally:
            self._pinned.put((buffer, self._mark_copies()))

    def write(self, tensor: int, local: int, data: Bytes) -> None:
        """See :class:`rankless.engine.io.read_buffers.ReadBuffers`."""
        sink = self._sink_of(tensor)
        stream = self._streams.get(sink.device) if isinstance(sink, TensorBytes) else None
        if stream is not None and isinstance(sink, TensorBytes):
            with stream.enqueue():
                sink.scatter(local, data)
        else:
            sink.write(local, data)

    def _mark_copies(self) -> CopyMark:
        return CopyMark([*self._streams.values()])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait until no device copies out of the buffers any more. Raises ``DeviceError``."""
        with suppress(*([] if error is None else [DeviceError])):
            wait_for_copies(self._streams.values())
