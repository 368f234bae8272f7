"""Writing what lies in many small runs on many ranks: each stripe is put together by its owner, and written whole."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterator, Sequence
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
from holdfast.storage.bulk import SECTOR, BulkWriter, aligned_buffer

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
        for piece, stripe in _put_together(crossings, part_of, wire, shelf):
            written.append(pool.submit(_write, piece, stripe, writers[piece.file], shelf, moved))
        found = [future.result() for future in written]
        for writer in writers.values():
            writer.sync()
    return gather(found)


def put_together(crossings: Sequence[Crossing], part_of: PartOf, wire: Wire) -> Iterator[tuple[Piece, Bytes]]:
    """The stripes that this rank owns, in the order of the plan, each valid until the next one is asked for."""
    shelf = _Shelf()
    for piece, buffer in _put_together(crossings, part_of, wire, shelf):
        yield piece, _inside(buffer, piece)
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
            return np.frombuffer(aligned_buffer(STRIPE + SECTOR), np.uint8)
        return self._free.get()

    def put_back(self, buffer: Bytes) -> None:
        """The buffer may be used again."""
        self._free.put(buffer)


@dataclass
class _Flight:
    """A stripe on its way: what this rank sends, or what it waits for to put together in ``buffer``."""

    works: Works
    piece: Piece | None = None
    buffer: Bytes | None = None
    arriving: list[tuple[Share, Bytes]] = field(default_factory=list)


def _put_together(
    crossings: Sequence[Crossing], part_of: PartOf, wire: Wire, shelf: _Shelf
) -> Iterator[tuple[Piece, Bytes]]:
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


def _landed(flight: _Flight, wire: Wire) -> Iterator[tuple[Piece, Bytes]]:
    wire.wait(flight.works)
    if flight.piece is not None and flight.buffer is not None:
        for place, data in flight.arriving:
            place.put(data, _inside(flight.buffer, flight.piece))
        yield flight.piece, flight.buffer


def _pass_on(crossing: Passed, part_of: PartOf, wire: Wire) -> _Flight:
    return _Flight([wire.send(_bytes_of(part_of(crossing.tensor), crossing.cut), crossing.owner)])


def _assemble(crossing: Owned, part_of: PartOf, wire: Wire, buffer: Bytes) -> _Flight:
    (piece,) = crossing.pieces
    works, arriving = [], []
    for cut, place in crossing.cuts:
        if cut.source == wire.rank:
            place.put(_bytes_of(part_of(piece.tensor), cut), _inside(buffer, piece))
            continue
        data = np.empty(cut.size, np.uint8)
        works.append(wire.receive(data, cut.source))
        arriving.append((place, data))
    return _Flight(works, piece, buffer, arriving)


def _bytes_of(part: LocalPart, cut: Cut) -> Bytes:
    data = part.view(cut.local, cut.local + cut.size)
    if data is None:
        data = np.empty(cut.size, np.uint8)
        part.copy_out(cut.local, data)
    return data


def _inside(buffer: Bytes, piece: Piece) -> Bytes:
    """Where a stripe lies in its buffer: as far from a page's start as in the file."""
    lead = piece.offset % SECTOR
    return buffer[lead : lead + piece.stop - piece.start]


def _write(piece: Piece, buffer: Bytes, writer: BulkWriter, shelf: _Shelf, moved: Moved) -> list[tuple[int, Fragment]]:
    try:
        stripe = _inside(buffer, piece)
        writer.write(piece.offset, stripe.data)
        moved(len(stripe))
        return list(hashed(piece, stripe))
    finally:
        shelf.put_back(buffer)


def hashed(piece: Piece, data: Bytes) -> Iterator[tuple[int, Fragment]]:
    """The fragments of a piece that may reach over several blocks."""
    at = piece.start
    while at < piece.stop:
        stop = min(piece.stop, (at // BLOCK + 1) * BLOCK)
        yield piece.tensor, Fragment(at, stop, crc64(data[at - piece.start : stop - piece.start]))
        at = stop
