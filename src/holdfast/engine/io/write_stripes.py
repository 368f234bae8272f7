"""Writing what lies in many small runs on many ranks: each stripe is put together by its owner, and written whole."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from holdfast.engine.io.p2p import P2PExchange, Works
from holdfast.engine.io.requests import THREADS, Fragments, Moved, PartOf, ignore_progress, merge_fragments
from holdfast.engine.io.tensor_bytes import TensorBytes
from holdfast.engine.plan.file_ranges import FileRange
from holdfast.engine.plan.routes import Crossing, OwnedStripe, RemoteStripe, ShardContribution
from holdfast.engine.plan.stripes import STRIPE, StripeSlice
from holdfast.ondisk.blocks import BLOCK_BYTES, Fragment, crc64
from holdfast.storage.direct_io import SECTOR_BYTES, DirectWriter
from holdfast.storage.memory import Bytes, aligned_buffer

#: Stripes that a rank has under way between ranks at a time; as many may be on their way to storage.
MAX_IN_FLIGHT = 3


def write_stripes(
    files: Sequence[Path],
    crossings: Sequence[Crossing],
    part_of: PartOf,
    wire: P2PExchange,
    moved: Moved = ignore_progress,
) -> Fragments:
    """Pass on what others put together, put together and write what this rank owns, and return what it hashed.

    A rank that cannot write goes on passing bytes to the others before it raises, so that none waits for it.
    """
    shelf = _BufferPool()
    written: list[Future[list[tuple[int, Fragment]]]] = []
    with ExitStack() as stack:
        owned = [crossing for crossing in crossings if isinstance(crossing, OwnedStripe)]
        numbers = sorted({piece.file for crossing in owned for piece in crossing.pieces})
        writers = {file: stack.enter_context(DirectWriter(files[file])) for file in numbers}
        pool = stack.enter_context(ThreadPoolExecutor(THREADS, "holdfast"))
        for pieces, stripe in _assemble_all(crossings, part_of, wire, shelf):
            written.append(pool.submit(_write, pieces, stripe, writers, shelf, moved))
        found = [future.result() for future in written]
        for writer in writers.values():
            writer.sync()
    return merge_fragments(found)


def assemble_stripes(
    crossings: Sequence[Crossing], part_of: PartOf, wire: P2PExchange
) -> Iterator[tuple[FileRange, Bytes]]:
    """The pieces of the stripes that this rank owns, in the order of the plan, valid until the next one is asked for.

    A stripe has several pieces where its tensor is stored as several.
    """
    shelf = _BufferPool()
    for pieces, buffer in _assemble_all(crossings, part_of, wire, shelf):
        stripe = _inside(buffer, pieces)
        yield from ((piece, _cut_out(stripe, piece)) for piece in pieces)
        shelf.put_back(buffer)


class _BufferPool:
    """A few aligned buffers, each to be taken and put back."""

    def __init__(self) -> None:
        self._free: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
        self._unmade = 2 * MAX_IN_FLIGHT

    def take(self) -> Bytes:
        """A buffer; waits for one when all are in use."""
        if self._unmade and self._free.empty():
            self._unmade -= 1
            return aligned_buffer(STRIPE + SECTOR_BYTES)
        return self._free.get()

    def put_back(self, buffer: Bytes) -> None:
        """The buffer may be used again."""
        self._free.put(buffer)


@dataclass
class _InFlightStripe:
    """A stripe on its way: what this rank sends, or what it waits for to put together in ``buffer``."""

    works: Works
    pieces: Sequence[FileRange] = ()
    buffer: Bytes | None = None
    arriving: list[tuple[StripeSlice, Bytes]] = field(default_factory=list)


def _assemble_all(
    crossings: Sequence[Crossing], part_of: PartOf, wire: P2PExchange, shelf: _BufferPool
) -> Iterator[tuple[Sequence[FileRange], Bytes]]:
    """The stripes that this rank owns, in buffers of the shelf; on the way it sends what others need."""
    flying: deque[_InFlightStripe] = deque()
    for crossing in crossings:
        if len(flying) == MAX_IN_FLIGHT:
            yield from _wait_for_stripe(flying.popleft(), wire)
        if isinstance(crossing, OwnedStripe):
            flying.append(_assemble(crossing, part_of, wire, shelf.take()))
        else:
            flying.append(_pass_on(crossing, part_of, wire))
    while flying:
        yield from _wait_for_stripe(flying.popleft(), wire)


def _wait_for_stripe(flight: _InFlightStripe, wire: P2PExchange) -> Iterator[tuple[Sequence[FileRange], Bytes]]:
    wire.wait(flight.works)
    if flight.buffer is not None:
        for place, data in flight.arriving:
            place.put(data, _inside(flight.buffer, flight.pieces))
        yield flight.pieces, flight.buffer


def _pass_on(crossing: RemoteStripe, part_of: PartOf, wire: P2PExchange) -> _InFlightStripe:
    return _InFlightStripe([wire.send(_bytes_of(part_of(crossing.tensor), crossing.cut), crossing.owner)])


def _assemble(crossing: OwnedStripe, part_of: PartOf, wire: P2PExchange, buffer: Bytes) -> _InFlightStripe:
    pieces = crossing.pieces
    works, arriving = [], []
    for cut, place in crossing.cuts:
        if cut.source == wire.rank:
            place.put(_bytes_of(part_of(pieces[0].tensor), cut), _inside(buffer, pieces))
            continue
        data = np.empty(cut.size, np.uint8)
        works.append(wire.receive(data, cut.source))
        arriving.append((place, data))
    return _InFlightStripe(works, pieces, buffer, arriving)


def _bytes_of(part: TensorBytes, cut: ShardContribution) -> Bytes:
    data = part.view(cut.local, cut.local + cut.size)
    if data is None:
        data = np.empty(cut.size, np.uint8)
        part.copy_out(cut.local, data)
    return data


def _inside(buffer: Bytes, pieces: Sequence[FileRange]) -> Bytes:
    """Where a stripe lies in its buffer: as far from a page's start as in the file."""
    lead = pieces[0].offset % SECTOR_BYTES
    return buffer[lead : lead + max(piece.local + piece.stop - piece.start for piece in pieces)]


def _cut_out(stripe: Bytes, piece: FileRange) -> Bytes:
    return stripe[piece.local : piece.local + piece.stop - piece.start]


def _write(
    pieces: Sequence[FileRange], buffer: Bytes, writers: Mapping[int, DirectWriter], shelf: _BufferPool, moved: Moved
) -> list[tuple[int, Fragment]]:
    try:
        stripe = _inside(buffer, pieces)
        found: list[tuple[int, Fragment]] = []
        for piece in pieces:
            data = _cut_out(stripe, piece)
            writers[piece.file].write(piece.offset, _same_page_offset(data, piece).data)
            moved(len(data))
            found += hash_fragments(piece, data)
        return found
    finally:
        shelf.put_back(buffer)


def _same_page_offset(data: Bytes, piece: FileRange) -> Bytes:
    """The bytes as far from a page's start as they go in the file: a copy, for those that were not."""
    lead = piece.offset % SECTOR_BYTES
    if data.ctypes.data % SECTOR_BYTES == lead:
        return data
    copy = aligned_buffer(lead + len(data))[lead:]
    np.copyto(copy, data)
    return copy


def hash_fragments(piece: FileRange, data: Bytes) -> Iterator[tuple[int, Fragment]]:
    """The fragments of a piece that may reach over several blocks."""
    at = piece.start
    while at < piece.stop:
        stop = min(piece.stop, (at // BLOCK_BYTES + 1) * BLOCK_BYTES)
        yield piece.tensor, Fragment(at, stop, crc64(data[at - piece.start : stop - piece.start]))
        at = stop
