"""Reading of bytes that many ranks need: one rank reads them, keeps its part, and sends the others theirs.

:mod:`rankless.load.rank_reads` calls both functions on every rank in the vote "reading", with ``share_reads`` or if
ranks are on several hosts; :mod:`rankless.inference.joined_reads` calls :func:`read_shared`. All ranks must begin the
items in the order of the plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from rankless.engine.io.byte_sinks import ByteSink
from rankless.engine.io.read_order import rotate_by_rank
from rankless.engine.io.requests import (
    Fragments,
    OnBytesMoved,
    SinkOf,
    hash_fragments,
    ignore_progress,
    merge_fragments,
)
from rankless.engine.io.source_reader import SourceReader
from rankless.engine.io.tensor_sources import Source
from rankless.engine.plan.file_ranges import FileRange, count_bytes
from rankless.engine.plan.load_plan import BroadcastChunk
from rankless.engine.plan.stripe_owners import OwnedStripe, RemoteStripe, ShardContribution, StripeTask
from rankless.engine.plan.stripes import STRIPE, StripeSlice
from rankless.errors import RanklessError
from rankless.ondisk.block_crcs import Fragment
from rankless.process.worker_threads import THREADS, run_in_threads
from rankless.storage.aligned_memory import BufferPool, Bytes
from rankless.storage.direct_io import BufferedReader
from rankless.storage.exact_reader import ExactReaderFactory
from rankless.storage.reader_pool import MakeReaders, ReaderPool

if TYPE_CHECKING:
    from rankless.engine.io.p2p import P2PExchange, SentBytes, Works  # only ranks that exchange need its module

#: How many of its own items a rank reads before it is their turn to be sent.
_READ_AHEAD = 4

#: The most bytes of items that are being sent or received.
MAX_BYTES_IN_FLIGHT = 64 * 2**20

_ReadResult = list[tuple[int, Fragment]]


def read_stripes(
    files: Sequence[Source],
    stripes: Sequence[OwnedStripe],
    rank: int,
    sink_of: SinkOf,
    on_moved: OnBytesMoved = ignore_progress,
    *,
    make_readers: MakeReaders = ReaderPool,
) -> Fragments:
    """Read stripes whole, as other ranks do, keep this rank's part of each, and return the fragments that it hashed.

    Each rank of a load calls it for itself; no message is sent.
    """
    buffers = BufferPool(STRIPE)
    with SourceReader(files, make_readers(BufferedReader)) as reader:

        def read_one(stripe: OwnedStripe) -> _ReadResult:
            size = count_bytes(stripe.file_ranges)
            data = buffers.get()[:size]
            fragments = _read_ranges(stripe.file_ranges, data, reader)
            for contribution, stripe_slice in stripe.contributions:
                _copy_contribution(contribution, stripe_slice, data, sink_of(stripe.file_ranges[0].tensor))
            on_moved(size)
            return fragments

        return _group_by_tensor(run_in_threads(read_one, rotate_by_rank(stripes, rank)))


def _group_by_tensor(results: Sequence[_ReadResult]) -> Fragments:
    """Group fragments by tensor.

    They are not combined: the fragments of ranks that read other stripes must fit together.
    """
    result: Fragments = {}
    for tensor, fragment in (item for items in results for item in items):
        result.setdefault(tensor, []).append(fragment)
    return result


def read_shared(
    files: Sequence[Source],
    items: Sequence[StripeTask | BroadcastChunk],
    sink_of: SinkOf,
    p2p: P2PExchange,
    on_moved: OnBytesMoved = ignore_progress,
    *,
    make_readers: MakeReaders = ReaderPool,
    hashed: bool = True,
) -> Fragments:
    """Read the items that this rank owns and send them; receive the others. Return the fragments hashed by this rank.

    All ranks start the items in one order, and an item is not finished before later ones are started: so several ranks
    send at the same time. A rank that cannot read still sends bytes, with arbitrary values, before it raises, so that
    no other rank waits. If not ``hashed``, there are no fragments.
    """
    in_flight: deque[_ReadInFlight] = deque()
    with ExitStack() as stack:
        reader = stack.enter_context(SourceReader(files, make_readers(ExactReaderFactory())))
        pool = stack.enter_context(ThreadPoolExecutor(THREADS, "rankless"))
        relay = _Relay(reader, sink_of, p2p, pool, on_moved, hashed)
        nbytes = 0
        for item_in_flight in relay.read_ahead(items):
            relay.start_transfer(item_in_flight)
            in_flight.append(item_in_flight)
            nbytes += len(item_in_flight.data)
            while nbytes > MAX_BYTES_IN_FLIGHT:
                nbytes -= len(in_flight[0].data)
                relay.finish_item(in_flight.popleft())
        while in_flight:
            relay.finish_item(in_flight.popleft())
        for error in relay.errors:
            raise error
        return merge_fragments(relay.fragments)


def _ranges_to_read(item: StripeTask | BroadcastChunk, rank: int) -> Sequence[FileRange]:
    """Return the file ranges that this rank reads for an item."""
    if isinstance(item, OwnedStripe):
        return item.file_ranges
    return item.chunk.file_ranges if isinstance(item, BroadcastChunk) and item.owner == rank else ()


def _read_ranges(
    file_ranges: Sequence[FileRange], data: Bytes, reader: SourceReader, *, hashed: bool = True
) -> _ReadResult:
    """Read the file ranges of a stripe one after another into ``data``. Return their fragments, if it is ``hashed``."""
    fragments: _ReadResult = []
    filled = 0
    for file_range in file_ranges:
        buffer = data[filled : filled + file_range.stop - file_range.start]
        reader.read(file_range.file, file_range.offset, buffer.data)
        fragments += hash_fragments(file_range, buffer) if hashed else ()
        filled += len(buffer)
    return fragments


class _ReadInFlight(msgspec.Struct):
    """An item on its way into ``data``: read by this rank, or sent by another."""

    item: StripeTask | BroadcastChunk
    data: Bytes = msgspec.field(default_factory=lambda: np.empty(0, np.uint8))
    reading: Future[_ReadResult] | None = None
    works: Works = ()


class _Relay(msgspec.Struct):
    """Reads, sends and receives items. This rank hashed the ``fragments``; ``errors`` come from its reads."""

    reader: SourceReader
    sink_of: SinkOf
    p2p: P2PExchange
    pool: ThreadPoolExecutor
    on_moved: OnBytesMoved
    hashed: bool
    fragments: list[_ReadResult] = msgspec.field(default_factory=list)
    errors: list[RanklessError] = msgspec.field(default_factory=list)

    def read_ahead(self, items: Iterable[StripeTask | BroadcastChunk]) -> Iterator[_ReadInFlight]:
        """Yield the items. The next :data:`_READ_AHEAD` items of this rank are being read."""
        upcoming: deque[_ReadInFlight] = deque()
        reads = 0
        for item in items:
            upcoming.append(self._start_read(item))
            reads += upcoming[-1].reading is not None
            while reads > _READ_AHEAD:
                reads -= upcoming[0].reading is not None
                yield upcoming.popleft()
        yield from upcoming

    def _start_read(self, item: StripeTask | BroadcastChunk) -> _ReadInFlight:
        item_in_flight = _ReadInFlight(item)
        if file_ranges := _ranges_to_read(item, self.p2p.rank):
            item_in_flight.data = self._get_destination(item)
            item_in_flight.reading = self.pool.submit(
                _read_ranges, file_ranges, item_in_flight.data, self.reader, hashed=self.hashed
            )
        return item_in_flight

    def start_transfer(self, item_in_flight: _ReadInFlight) -> None:
        """Start to send an item as soon as it is read, or to receive it."""
        item = item_in_flight.item
        if item_in_flight.reading is None:
            sender = item.owner if isinstance(item, BroadcastChunk | RemoteStripe) else self.p2p.rank
            item_in_flight.data = self._get_destination(item)
            item_in_flight.works = [self.p2p.receive(item_in_flight.data, sender)]
            return
        try:
            self.fragments.append(item_in_flight.reading.result())
        except RanklessError as error:
            self.errors.append(error)
        item_in_flight.works = list(self._send_item(item, item_in_flight.data))

    def finish_item(self, item_in_flight: _ReadInFlight) -> None:
        """Wait for the transfer of an item, and write it into this rank's shard."""
        self.p2p.wait(item_in_flight.works)
        self._store_item(item_in_flight.item, item_in_flight.data)
        self.on_moved(len(item_in_flight.data))

    def _get_destination(self, item: StripeTask | BroadcastChunk) -> Bytes:
        """Return the memory for an item: the shard itself if possible, otherwise a new buffer."""
        if isinstance(item, OwnedStripe):
            return np.empty(sum(file_range.stop - file_range.start for file_range in item.file_ranges), np.uint8)
        if isinstance(item, RemoteStripe):
            size = item.contribution.size
            view = self._view_shard(item.tensor, item.contribution.local, size)
        else:
            size, (first, *others) = item.chunk.size, item.chunk.file_ranges
            view = None if others else self._view_shard(first.tensor, first.local, size)
        return np.empty(size, np.uint8) if view is None else view

    def _view_shard(self, tensor: int, local: int, size: int) -> Bytes | None:
        return self.sink_of(tensor).view(local, local + size)

    def _send_item(self, item: StripeTask | BroadcastChunk, data: Bytes) -> Iterator[SentBytes]:
        if isinstance(item, BroadcastChunk):
            yield from (self.p2p.send(data, rank) for rank in item.holders if rank != self.p2p.rank)
        elif isinstance(item, OwnedStripe):
            for contribution, stripe_slice in item.contributions:
                others = [rank for rank in contribution.holders if rank != self.p2p.rank]
                if others:
                    outgoing = np.empty(contribution.size, np.uint8)
                    stripe_slice.copy_out(data, outgoing)
                    yield from (self.p2p.send(outgoing, rank) for rank in others)

    def _store_item(self, item: StripeTask | BroadcastChunk, data: Bytes) -> None:
        if isinstance(item, OwnedStripe):
            for contribution, stripe_slice in item.contributions:
                if self.p2p.rank in contribution.holders:
                    _copy_contribution(contribution, stripe_slice, data, self.sink_of(item.file_ranges[0].tensor))
        elif isinstance(item, RemoteStripe):
            self._write_shard(item.tensor, item.contribution.local, data)
        else:
            for file_range in item.chunk.file_ranges:
                start = file_range.offset - item.chunk.offset
                self._write_shard(
                    file_range.tensor, file_range.local, data[start : start + file_range.stop - file_range.start]
                )

    def _write_shard(self, tensor: int, local: int, data: Bytes) -> None:
        """Write bytes into a shard, unless they were read in place."""
        view = self._view_shard(tensor, local, len(data))
        if view is None or view.ctypes.data != data.ctypes.data:
            self.sink_of(tensor).write(local, data)


def _copy_contribution(
    contribution: ShardContribution, stripe_slice: StripeSlice, stripe: Bytes, sink: ByteSink
) -> None:
    """Copy a shard's part of a stripe into the shard."""
    view = sink.view(contribution.local, contribution.local + contribution.size)
    data = np.empty(contribution.size, np.uint8) if view is None else view
    stripe_slice.copy_out(stripe, data)
    if view is None:
        sink.write(contribution.local, data)
