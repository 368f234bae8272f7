"""Copies of shards out of accelerators, which the devices make by themselves while the threads of the process go on.

A contiguous shard is one copy, however large. Small shards that lie next to each other in memory are gathered in a
scratch on the device first, and strided ones, too: a copy costs some microseconds, and rows of a strided shard would be
many. The scratch is kept, so that a save allocates nothing on the device.

:mod:`rankless.engine.io.device_staging` and :mod:`rankless.engine.io.device_windows` enqueue with it, in the thread of
the caller of a save: the copies follow the kernels on its current streams. The shards must not change before the copies
are done, and only one thread may use the scratch at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec
import torch

from rankless.engine.io.device_streams import SCRATCH_BYTES, CopyStream, DeviceEvent, wait_for_copies
from rankless.engine.io.tensor_bytes import TensorBytes
from rankless.errors import DeviceError
from rankless.storage.aligned_memory import Bytes

#: Contiguous pieces of fewer bytes are gathered.
_SMALL = 2**20


class CopyPiece(NamedTuple):
    """``nbytes`` bytes of a shard from ``start`` on, and the offset in memory that they are copied to."""

    shard: TensorBytes
    start: int
    nbytes: int
    offset: int


class CopyMark:
    """A point in the copies of some devices."""

    def __init__(self, streams: Sequence[CopyStream]) -> None:
        self._events: list[tuple[CopyStream, DeviceEvent]] = [(stream, stream.record_event()) for stream in streams]

    def wait(self) -> None:
        """Wait until all copies before it are done. Raises ``DeviceError``."""
        for stream, event in self._events:
            stream.wait_for(event)

    def precede_caller(self) -> None:
        """Let all copies run before the kernels that the calling thread enqueues later on its current streams."""
        for stream, event in self._events:
            stream.precede_caller(event)


class DeviceCopies:
    """Copies that follow the kernels that the calling thread has enqueued, and each other."""

    def __init__(self, streams: Sequence[CopyStream]) -> None:
        self._streams = streams
        for stream in streams:
            stream.follow_caller()

    def enqueue(self, pieces: Iterable[CopyPiece], memory: Bytes) -> None:
        """Enqueue copies into ``memory``. The shards must not change before these are done."""
        by_device: dict[torch.device, list[CopyPiece]] = {}
        for piece in pieces:
            by_device.setdefault(piece.shard.device, []).append(piece)
        for stream in self._streams:
            with stream.enqueue():
                batch = _Batch(stream, torch.from_numpy(memory))
                for piece in join_pieces(by_device.get(stream.device, ())):
                    _enqueue_piece(piece, batch)
                batch.flush()

    def mark(self) -> CopyMark:
        """Return the point after all copies that are enqueued."""
        return CopyMark(self._streams)

    def abandon(self) -> None:
        """Wait until no device writes into memory any more, whatever has happened."""
        with suppress(DeviceError):
            wait_for_copies(self._streams)


def join_pieces(pieces: Iterable[CopyPiece]) -> Iterator[CopyPiece]:
    """Join pieces that follow one another both in a shard and in memory."""
    joined: CopyPiece | None = None
    for piece in pieces:
        if joined is not None and _follows(piece, joined):
            joined = joined._replace(nbytes=joined.nbytes + piece.nbytes)
            continue
        if joined is not None:
            yield joined
        joined = piece
    if joined is not None:
        yield joined


def _follows(piece: CopyPiece, before: CopyPiece) -> bool:
    ends = before.start + before.nbytes, before.offset + before.nbytes
    return piece.shard is before.shard and (piece.start, piece.offset) == ends


def _enqueue_piece(piece: CopyPiece, batch: _Batch) -> None:
    source = piece.shard.view_on_device(piece.start, piece.start + piece.nbytes)
    if source is not None:
        batch.add(source, piece.offset)
        return
    for done in range(0, piece.nbytes, SCRATCH_BYTES):  # a multiple of the size of each dtype
        batch.copy_gathered(piece.shard, piece.start + done, piece.offset + done, piece.nbytes - done)


class _Batch(msgspec.Struct):
    """Contiguous bytes on a device that are copied together, to neighbouring places in memory from ``offset`` on."""

    stream: CopyStream
    memory: torch.Tensor
    offset: int = 0
    nbytes: int = 0
    sources: list[torch.Tensor] = msgspec.field(default_factory=list)

    def add(self, source: torch.Tensor, offset: int) -> None:
        size = len(source)
        if offset != self.offset + self.nbytes or self.nbytes + size > SCRATCH_BYTES or size >= _SMALL:
            self.flush()
            self.offset = offset
        if size >= _SMALL:
            self.copy(source, offset)
            return
        self.sources.append(source)
        self.nbytes += size

    def flush(self) -> None:
        """Copy the pieces that were added."""
        if len(self.sources) == 1:
            self.copy(self.sources[0], self.offset)
        elif self.sources:
            gathered = self.stream.scratch[: self.nbytes]
            torch.cat(self.sources, out=gathered)
            self.copy(gathered, self.offset)
        self.sources, self.nbytes = [], 0

    def copy_gathered(self, shard: TensorBytes, start: int, offset: int, most: int) -> None:
        """Gather bytes of a strided shard, as many as fit but ``most``, and copy them."""
        self.flush()
        gathered = self.stream.scratch[:most]
        shard.gather(start, gathered)
        self.copy(gathered, offset)

    def copy(self, source: torch.Tensor, offset: int) -> None:
        self.memory[offset : offset + len(source)].copy_(source, non_blocking=True)
