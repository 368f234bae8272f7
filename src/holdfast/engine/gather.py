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

from holdfast.engine.local import Bytes, LocalPart
from holdfast.engine.routes import Crossing, Cut, Owned, Passed
from holdfast.engine.stripes import STRIPE, Share
from holdfast.engine.transfer import THREADS, Fragments, Moved, PartOf, Piece, gather, untold
from holdfast.engine.wire import Wire, Works
from holdfast.layout.blocks import BLOCK, Fragment, crc64
from holdfast.storage.bulk import SECTOR, BulkWriter
from holdfast.storage.memory import aligned_buffer

#: Stripes that a rank has under way between ranks at a time; as many may be on their way to storage.
AHEAD = 3


def write_stripes(
    files: Sequence[Path], crossings: Sequence[Crossing], part_of: PartOf, wire: Wire, moved: Moved = untold
) -> Fragments:
    """Pass on what others put together, put together and write what this rank owns, and return what it hashed.

    A rank that cannot write goes on passing bytes to the others before it raises, so that none waits for it.
    """
    shelf = _Shelf()
    written: list[Future[list[tuple[int, Fragment]]]] = []
    with ExitStack() as stack:
        owned = [crossing for crossing in crossings if isinstance(crossing, Owned)]
        numbers = sorted({piece.file for crossing in owned for piece in crossing.pieces})
        writers = {file: stack.enter_context(BulkWriter(files[file])) for file in numbers}
        pool = stack.enter_context(ThreadPoolExecutor(THREADS, "holdfast"))
        for pieces, stripe in _put_together(crossings, part_of, wire, shelf):
            written.append(pool.submit(_write, pieces, stripe, writers, shelf, moved))
        found = [future.result() for future in written]
        for writer in writers.values():
            writer.sync()
    return gather(found)


def put_together(crossings: Sequence[Crossing], part_of: PartOf, wire: Wire) -> Iterator[tuple[Piece, Bytes]]:
    """The pieces of the stripes that this rank owns, in the order of the plan, valid until the next one is asked for.

    A stripe has several pieces where its tensor is stored as several.
    """
    shelf = _Shelf()
    for pieces, buffer in _put_together(crossings, part_of, wire, shelf):
        stripe = _inside(buffer, pieces)
        yield from ((piece, _cut_out(stripe, piece)) for piece in pieces)
        shelf.put_back(buffer)


class _Shelf:
    """A few aligned buffers, each to be taken and put back."""

    def __init__(self) -> None:
        self._free: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
        self._unmade = 2 * AHEAD

    def take(self) -> Bytes:
        """A buffer; waits for one when all are in use."""
        if self._unmade and self._free.empty():
            self._unmade -= 1
            return aligned_buffer(STRIPE + SECTOR)
        return self._free.get()

    def put_back(self, buffer: Bytes) -> None:
        """The buffer may be used again."""
        self._free.put(buffer)


@dataclass
class _Flight:
    """A stripe on its way: what this rank sends, or what it waits for to put together in ``buffer``."""

    works: Works
    pieces: Sequence[Piece] = ()
    buffer: Bytes | None = None
    arriving: list[tuple[Share, Bytes]] = field(default_factory=list)


def _put_together(
    crossings: Sequence[Crossing], part_of: PartOf, wire: Wire, shelf: _Shelf
) -> Iterator[tuple[Sequence[Piece], Bytes]]:
    """The stripes that this rank owns, in buffers of the shelf; on the way it sends what others need."""
    flying: deque[_Flight] = deque()
    for crossing in crossings:
        if len(flying) == AHEAD:
            yield from _landed(flying.popleft(), wire)
        if isinstance(crossing, Owned):
            flying.append(_assemble(crossing, part_of, wire, shelf.take()))
        else:
            flying.append(_pass_on(crossing, part_of, wire))
    while flying:
        yield from _landed(flying.popleft(), wire)


def _landed(flight: _Flight, wire: Wire) -> Iterator[tuple[Sequence[Piece], Bytes]]:
    wire.wait(flight.works)
    if flight.buffer is not None:
        for place, data in flight.arriving:
            place.put(data, _inside(flight.buffer, flight.pieces))
        yield flight.pieces, flight.buffer


def _pass_on(crossing: Passed, part_of: PartOf, wire: Wire) -> _Flight:
    return _Flight([wire.send(_bytes_of(part_of(crossing.tensor), crossing.cut), crossing.owner)])


def _assemble(crossing: Owned, part_of: PartOf, wire: Wire, buffer: Bytes) -> _Flight:
    pieces = crossing.pieces
    works, arriving = [], []
    for cut, place in crossing.cuts:
        if cut.source == wire.rank:
            place.put(_bytes_of(part_of(pieces[0].tensor), cut), _inside(buffer, pieces))
            continue
        data = np.empty(cut.size, np.uint8)
        works.append(wire.receive(data, cut.source))
        arriving.append((place, data))
    return _Flight(works, pieces, buffer, arriving)


def _bytes_of(part: LocalPart, cut: Cut) -> Bytes:
    data = part.view(cut.local, cut.local + cut.size)
    if data is None:
        data = np.empty(cut.size, np.uint8)
        part.copy_out(cut.local, data)
    return data


def _inside(buffer: Bytes, pieces: Sequence[Piece]) -> Bytes:
    """Where a stripe lies in its buffer: as far from a page's start as in the file."""
    lead = pieces[0].offset % SECTOR
    return buffer[lead : lead + max(piece.local + piece.stop - piece.start for piece in pieces)]


def _cut_out(stripe: Bytes, piece: Piece) -> Bytes:
    return stripe[piece.local : piece.local + piece.stop - piece.start]


def _write(
    pieces: Sequence[Piece], buffer: Bytes, writers: Mapping[int, BulkWriter], shelf: _Shelf, moved: Moved
) -> list[tuple[int, Fragment]]:
    try:
        stripe = _inside(buffer, pieces)
        found: list[tuple[int, Fragment]] = []
        for piece in pieces:
            data = _cut_out(stripe, piece)
            writers[piece.file].write(piece.offset, _as_far_from_a_page(data, piece).data)
            moved(len(data))
            found += hashed(piece, data)
        return found
    finally:
        shelf.put_back(buffer)


def _as_far_from_a_page(data: Bytes, piece: Piece) -> Bytes:
    """The bytes as far from a page's start as they go in the file: a copy, for those that were not."""
    lead = piece.offset % SECTOR
    if data.ctypes.data % SECTOR == lead:
        return data
    copy = aligned_buffer(lead + len(data))[lead:]
    np.copyto(copy, data)
    return copy


def hashed(piece: Piece, data: Bytes) -> Iterator[tuple[int, Fragment]]:
    """The fragments of a piece that may reach over several blocks."""
    at = piece.start
    while at < piece.stop:
        stop = min(piece.stop, (at // BLOCK + 1) * BLOCK)
        yield piece.tensor, Fragment(at, stop, crc64(data[at - piece.start : stop - piece.start]))
        at = stop
