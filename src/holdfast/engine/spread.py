"""Reading what many ranks need: one reads it, keeps its own, and passes the rest on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from holdfast.engine.fetch import Copied
from holdfast.engine.gather import AHEAD, hashed
from holdfast.engine.local import Bytes, Sink
from holdfast.engine.opened import Opened
from holdfast.engine.routes import Crossing, Cut, Owned, Passed
from holdfast.engine.stagger import staggered
from holdfast.engine.stripes import STRIPE, Share
from holdfast.engine.transfer import (
    THREADS,
    Fragments,
    Moved,
    Piece,
    SinkOf,
    gather,
    in_threads,
    nbytes_of,
    untold,
)
from holdfast.engine.wire import Sent, Wire, Works
from holdfast.engine.woven import Source
from holdfast.errors import HoldfastError
from holdfast.layout.blocks import Fragment
from holdfast.storage.memory import Buffers

_Found = list[tuple[int, Fragment]]


def read_stripes(
    files: Sequence[Source], stripes: Sequence[Owned], rank: int, sink_of: SinkOf, moved: Moved = untold
) -> Fragments:
    """Read stripes whole, as other ranks do, keep this rank's cut of each, and return what was hashed."""
    buffers = Buffers(STRIPE)
    with Opened(files) as opened:

        def work(stripe: Owned) -> _Found:
            size = nbytes_of(stripe.pieces)
            data = buffers.get()[:size]
            found = _read(stripe.pieces, data, opened)
            for cut, place in stripe.cuts:
                _keep(cut, place, data, sink_of(stripe.pieces[0].tensor))
            moved(size)
            return found

        return _apart(in_threads(work, staggered(stripes, rank)))


def _apart(found: Sequence[_Found]) -> Fragments:
    """Fragments by tensor, not combined: those of ranks that read other stripes must fit together."""
    result: Fragments = {}
    for tensor, fragment in (item for items in found for item in items):
        result.setdefault(tensor, []).append(fragment)
    return result


def read_shared(
    files: Sequence[Source], items: Sequence[Crossing | Copied], sink_of: SinkOf, wire: Wire, moved: Moved = untold
) -> Fragments:
    """Read what this rank is the reader of and pass it on, take in what others read; return what was hashed here.

    A rank that cannot read goes on passing bytes, of whatever value, before it raises, so that none waits for it.
    """
    flying: deque[_Flight] = deque()
    with ExitStack() as stack:
        opened = stack.enter_context(Opened(files))
        pool = stack.enter_context(ThreadPoolExecutor(THREADS, "holdfast"))
        relay = _Relay(opened, sink_of, wire, pool, moved)
        for item in items:
            if len(flying) == AHEAD:
                relay.land(flying.popleft())
            flying.append(relay.launch(item))
        while flying:
            relay.land(flying.popleft())
        for error in relay.errors:
            raise error
        return gather(relay.found)


def _to_read(item: Crossing | Copied, rank: int) -> Sequence[Piece]:
    """The pieces that this rank reads for an item."""
    if isinstance(item, Owned):
        return item.pieces
    return item.chunk.pieces if isinstance(item, Copied) and item.owner == rank else ()


def _read(pieces: Sequence[Piece], data: Bytes, opened: Opened) -> _Found:
    """Read the pieces of a stripe one after another into ``data``."""
    found: _Found = []
    at = 0
    for piece in pieces:
        into = data[at : at + piece.stop - piece.start]
        opened.read(piece.file, piece.offset, into.data)
        found += hashed(piece, into)
        at += len(into)
    return found


@dataclass
class _Flight:
    """An item on its way into ``data``: read here, or sent by another rank."""

    item: Crossing | Copied
    data: Bytes
    reading: Future[_Found] | None = None
    works: Works = ()


@dataclass
class _Relay:
    """Reads, passes on, takes in. ``found`` is what was hashed; ``errors`` is what went wrong with reading."""

    opened: Opened
    sink_of: SinkOf
    wire: Wire
    pool: ThreadPoolExecutor
    moved: Moved
    found: list[_Found] = field(default_factory=list)
    errors: list[HoldfastError] = field(default_factory=list)

    def launch(self, item: Crossing | Copied) -> _Flight:
        """Begin to read, or to receive."""
        pieces = _to_read(item, self.wire.rank)
        data = self._room(item)
        if pieces:
            return _Flight(item, data, self.pool.submit(_read, pieces, data, self.opened))
        source = item.owner if isinstance(item, Copied | Passed) else self.wire.rank
        return _Flight(item, data, works=[self.wire.receive(data, source)])

    def land(self, flight: _Flight) -> None:
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

    def _room(self, item: Crossing | Copied) -> Bytes:
        """Where an item goes: in place where it can, else into memory of its own."""
        if isinstance(item, Owned):
            return np.empty(sum(piece.stop - piece.start for piece in item.pieces), np.uint8)
        if isinstance(item, Passed):
            size, view = item.cut.size, self._view(item.tensor, item.cut.local, item.cut.size)
        else:
            size, (first, *others) = item.chunk.size, item.chunk.pieces
            view = None if others else self._view(first.tensor, first.local, size)
        return np.empty(size, np.uint8) if view is None else view

    def _view(self, tensor: int, local: int, size: int) -> Bytes | None:
        return self.sink_of(tensor).view(local, local + size)

    def _pass_on(self, item: Crossing | Copied, data: Bytes) -> Iterator[Sent]:
        if isinstance(item, Copied):
            yield from (self.wire.send(data, rank) for rank in item.holders if rank != self.wire.rank)
        elif isinstance(item, Owned):
            for cut, place in item.cuts:
                others = [rank for rank in cut.holders if rank != self.wire.rank]
                if others:
                    mine = np.empty(cut.size, np.uint8)
                    place.take(data, mine)
                    yield from (self.wire.send(mine, rank) for rank in others)

    def _take_in(self, item: Crossing | Copied, data: Bytes) -> None:
        if isinstance(item, Owned):
            for cut, place in item.cuts:
                if self.wire.rank in cut.holders:
                    _keep(cut, place, data, self.sink_of(item.pieces[0].tensor))
        elif isinstance(item, Passed):
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


def _keep(cut: Cut, place: Share, stripe: Bytes, sink: Sink) -> None:
    view = sink.view(cut.local, cut.local + cut.size)
    data = np.empty(cut.size, np.uint8) if view is None else view
    place.take(stripe, data)
    if view is None:
        sink.write(cut.local, data)
