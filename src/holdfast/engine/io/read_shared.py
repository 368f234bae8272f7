"""Reading what many ranks need: one reads it, keeps its own, and passes the rest on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from holdfast.engine.io.p2p import P2PExchange, SentBytes, Works
from holdfast.engine.io.read_order import rotate_by_rank
from holdfast.engine.io.requests import (
    THREADS,
    Fragments,
    Moved,
    SinkOf,
    ignore_progress,
    merge_fragments,
    run_in_threads,
)
from holdfast.engine.io.source_reader import SourceReader
from holdfast.engine.io.sources import Source
from holdfast.engine.io.tensor_bytes import ByteSink
from holdfast.engine.io.write_stripes import MAX_IN_FLIGHT, hash_fragments
from holdfast.engine.plan.file_ranges import FileRange, count_bytes
from holdfast.engine.plan.load_plan import BroadcastChunk
from holdfast.engine.plan.routes import Crossing, OwnedStripe, RemoteStripe, ShardContribution
from holdfast.engine.plan.stripes import STRIPE, StripeSlice
from holdfast.errors import HoldfastError
from holdfast.ondisk.blocks import Fragment
from holdfast.storage.memory import BufferPool, Bytes

_Found = list[tuple[int, Fragment]]


def read_stripes(
    files: Sequence[Source], stripes: Sequence[OwnedStripe], rank: int, sink_of: SinkOf, moved: Moved = ignore_progress
) -> Fragments:
    """Read stripes whole, as other ranks do, keep this rank's cut of each, and return what was hashed."""
    buffers = BufferPool(STRIPE)
    with SourceReader(files) as opened:

        def work(stripe: OwnedStripe) -> _Found:
            size = count_bytes(stripe.pieces)
            data = buffers.get()[:size]
            found = _read(stripe.pieces, data, opened)
            for cut, place in stripe.cuts:
                _keep(cut, place, data, sink_of(stripe.pieces[0].tensor))
            moved(size)
            return found

        return _uncombined(run_in_threads(work, rotate_by_rank(stripes, rank)))


def _uncombined(found: Sequence[_Found]) -> Fragments:
    """Fragments by tensor, not combined: those of ranks that read other stripes must fit together."""
    result: Fragments = {}
    for tensor, fragment in (item for items in found for item in items):
        result.setdefault(tensor, []).append(fragment)
    return result


def read_shared(
    files: Sequence[Source],
    items: Sequence[Crossing | BroadcastChunk],
    sink_of: SinkOf,
    wire: P2PExchange,
    moved: Moved = ignore_progress,
) -> Fragments:
    """Read what this rank is the reader of and pass it on, take in what others read; return what was hashed here.

    A rank that cannot read goes on passing bytes, of whatever value, before it raises, so that none waits for it.
    """
    flying: deque[_ReadInFlight] = deque()
    with ExitStack() as stack:
        opened = stack.enter_context(SourceReader(files))
        pool = stack.enter_context(ThreadPoolExecutor(THREADS, "holdfast"))
        relay = _Relay(opened, sink_of, wire, pool, moved)
        for item in items:
            if len(flying) == MAX_IN_FLIGHT:
                relay.land(flying.popleft())
            flying.append(relay.launch(item))
        while flying:
            relay.land(flying.popleft())
        for error in relay.errors:
            raise error
        return merge_fragments(relay.found)


def _to_read(item: Crossing | BroadcastChunk, rank: int) -> Sequence[FileRange]:
    """The pieces that this rank reads for an item."""
    if isinstance(item, OwnedStripe):
        return item.pieces
    return item.chunk.pieces if isinstance(item, BroadcastChunk) and item.owner == rank else ()


def _read(pieces: Sequence[FileRange], data: Bytes, opened: SourceReader) -> _Found:
    """Read the pieces of a stripe one after another into ``data``."""
    found: _Found = []
    at = 0
    for piece in pieces:
        into = data[at : at + piece.stop - piece.start]
        opened.read(piece.file, piece.offset, into.data)
        found += hash_fragments(piece, into)
        at += len(into)
    return found


@dataclass
class _ReadInFlight:
    """An item on its way into ``data``: read here, or sent by another rank."""

    item: Crossing | BroadcastChunk
    data: Bytes
    reading: Future[_Found] | None = None
    works: Works = ()


@dataclass
class _Relay:
    """Reads, passes on, takes in. ``found`` is what was hashed; ``errors`` is what went wrong with reading."""

    opened: SourceReader
    sink_of: SinkOf
    wire: P2PExchange
    pool: ThreadPoolExecutor
    moved: Moved
    found: list[_Found] = field(default_factory=list)
    errors: list[HoldfastError] = field(default_factory=list)

    def launch(self, item: Crossing | BroadcastChunk) -> _ReadInFlight:
        """Begin to read, or to receive."""
        pieces = _to_read(item, self.wire.rank)
        data = self._room(item)
        if pieces:
            return _ReadInFlight(item, data, self.pool.submit(_read, pieces, data, self.opened))
        source = item.owner if isinstance(item, BroadcastChunk | RemoteStripe) else self.wire.rank
        return _ReadInFlight(item, data, works=[self.wire.receive(data, source)])

    def land(self, flight: _ReadInFlight) -> None:
        """What was begun is done: pass it on, or take it in."""
        if flight.reading is not None:
            try:
                self.found.append(flight.reading.result())
            except HoldfastError as error:
                self.errors.append(error)
            flight.works = list(self._pass_on(flight.item, flight.data))
        self.wire.wait(flight.works)
        self._take_in(flight.item, flight.data)
        self.moved(len(flight.data))

    def _room(self, item: Crossing | BroadcastChunk) -> Bytes:
        """Where an item goes: in place where it can, else into memory of its own."""
        if isinstance(item, OwnedStripe):
            return np.empty(sum(piece.stop - piece.start for piece in item.pieces), np.uint8)
        if isinstance(item, RemoteStripe):
            size, view = item.cut.size, self._view(item.tensor, item.cut.local, item.cut.size)
        else:
            size, (first, *others) = item.chunk.size, item.chunk.pieces
            view = None if others else self._view(first.tensor, first.local, size)
        return np.empty(size, np.uint8) if view is None else view

    def _view(self, tensor: int, local: int, size: int) -> Bytes | None:
        return self.sink_of(tensor).view(local, local + size)

    def _pass_on(self, item: Crossing | BroadcastChunk, data: Bytes) -> Iterator[SentBytes]:
        if isinstance(item, BroadcastChunk):
            yield from (self.wire.send(data, rank) for rank in item.holders if rank != self.wire.rank)
        elif isinstance(item, OwnedStripe):
            for cut, place in item.cuts:
                others = [rank for rank in cut.holders if rank != self.wire.rank]
                if others:
                    mine = np.empty(cut.size, np.uint8)
                    place.take(data, mine)
                    yield from (self.wire.send(mine, rank) for rank in others)

    def _take_in(self, item: Crossing | BroadcastChunk, data: Bytes) -> None:
        if isinstance(item, OwnedStripe):
            for cut, place in item.cuts:
                if self.wire.rank in cut.holders:
                    _keep(cut, place, data, self.sink_of(item.pieces[0].tensor))
        elif isinstance(item, RemoteStripe):
            self._put(item.tensor, item.cut.local, data)
        else:
            for piece in item.chunk.pieces:
                at = piece.offset - item.chunk.offset
                self._put(piece.tensor, piece.local, data[at : at + piece.stop - piece.start])

    def _put(self, tensor: int, local: int, data: Bytes) -> None:
        """Unless it is there already."""
        view = self._view(tensor, local, len(data))
        if view is None or view.ctypes.data != data.ctypes.data:
            self.sink_of(tensor).write(local, data)


def _keep(cut: ShardContribution, place: StripeSlice, stripe: Bytes, sink: ByteSink) -> None:
    view = sink.view(cut.local, cut.local + cut.size)
    data = np.empty(cut.size, np.uint8) if view is None else view
    place.take(stripe, data)
    if view is None:
        sink.write(cut.local, data)
