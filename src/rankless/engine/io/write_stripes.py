"""Writing of stripes, where many ranks hold many small ranges: the owner assembles a stripe and writes it whole.

:mod:`rankless.save.shard_writer` calls :func:`write_stripes` on every rank in the vote "writing" of a save without
staging; :mod:`rankless.engine.io.staging` calls :func:`assemble_stripes` in the vote on the copies. All ranks must
process the stripes in the order of the plan.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from rankless.engine.io.cell_exchange import CellExchange
from rankless.engine.io.p2p import P2PExchange, Works
from rankless.engine.io.requests import (
    Fragments,
    OnBytesMoved,
    ShardOf,
    hash_fragments,
    ignore_progress,
    merge_fragments,
)
from rankless.engine.io.tensor_bytes import TensorBytes
from rankless.engine.plan.cell_transfers import cut_out
from rankless.engine.plan.file_ranges import FileRange, count_bytes
from rankless.engine.plan.stripe_owners import OwnedStripe, RemoteStripe, ShardContribution, StripeTask
from rankless.engine.plan.stripes import STRIPE, StripeSlice
from rankless.observe.spans import span, traced
from rankless.ondisk.block_crcs import Fragment
from rankless.process.worker_threads import THREADS
from rankless.storage.aligned_memory import Bytes, aligned_buffer
from rankless.storage.direct_io import SECTOR_BYTES
from rankless.storage.writer_pool import WriterPool

#: Stripes that a rank exchanges with others at a time; as many more may be on their way to storage.
MAX_IN_FLIGHT = 3


@traced("write stripes", "write")
def write_stripes(
    files: Sequence[Path],
    tasks: Sequence[StripeTask],
    shard_of: ShardOf,
    cells: CellExchange,
    on_moved: OnBytesMoved = ignore_progress,
) -> Fragments:
    """Send contributions, assemble and write the stripes that this rank owns, and return the fragments that it hashed.

    Bytes in cells that another host writes are packed into ``cells`` instead. A rank that cannot write still sends its
    contributions before it raises, so that no other rank waits for it.
    """
    buffers = _StripeBuffers()
    futures: list[Future[list[tuple[int, Fragment]]]] = []

    def write_and_return(file_ranges: Sequence[FileRange], buffer: Bytes) -> list[tuple[int, Fragment]]:
        try:
            return _write_stripe(file_ranges, _stripe_view(buffer, file_ranges), writers, cells)
        finally:
            buffers.return_buffer(buffer)
            on_moved(count_bytes(file_ranges))

    with WriterPool(files) as writers, ThreadPoolExecutor(THREADS, "rankless") as pool:
        for file_ranges, stripe in _assemble_all(tasks, shard_of, cells.p2p, buffers):
            futures.append(pool.submit(write_and_return, file_ranges, stripe))
        results = [future.result() for future in futures]
        with span("sync", "sync"):
            writers.sync()
    return merge_fragments(results)


def assemble_stripes(
    tasks: Sequence[StripeTask], shard_of: ShardOf, p2p: P2PExchange
) -> Iterator[tuple[FileRange, Bytes]]:
    """Yield the file ranges of the stripes that this rank owns, in the order of the plan.

    The bytes are valid until the next one is requested. A stripe has several file ranges if its tensor is stored as
    several.
    """
    buffers = _StripeBuffers()
    for file_ranges, buffer in _assemble_all(tasks, shard_of, p2p, buffers):
        stripe = _stripe_view(buffer, file_ranges)
        yield from ((file_range, _slice_range(stripe, file_range)) for file_range in file_ranges)
        buffers.return_buffer(buffer)


class _StripeBuffers:
    """A few aligned buffers that are taken and returned."""

    def __init__(self) -> None:
        self._free: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
        self._unallocated = 2 * MAX_IN_FLIGHT

    def take_buffer(self) -> Bytes:
        """Return a free buffer; wait for one if all are in use."""
        if self._unallocated and self._free.empty():
            self._unallocated -= 1
            return aligned_buffer(STRIPE + SECTOR_BYTES)
        return self._free.get()

    def return_buffer(self, buffer: Bytes) -> None:
        """Make a buffer available again."""
        self._free.put(buffer)


class _InFlightStripe(msgspec.Struct):
    """A stripe in progress: this rank sends its contribution, or assembles the stripe in ``buffer``."""

    works: Works
    file_ranges: Sequence[FileRange] = ()
    buffer: Bytes | None = None
    incoming: list[tuple[StripeSlice, Bytes]] = msgspec.field(default_factory=list)


def _assemble_all(
    tasks: Sequence[StripeTask], shard_of: ShardOf, p2p: P2PExchange, buffers: _StripeBuffers
) -> Iterator[tuple[Sequence[FileRange], Bytes]]:
    """Yield the stripes that this rank owns, each in one of the buffers; meanwhile send other ranks their bytes."""
    in_flight: deque[_InFlightStripe] = deque()
    for task in tasks:
        if len(in_flight) == MAX_IN_FLIGHT:
            yield from _wait_for_stripe(in_flight.popleft(), p2p)
        if isinstance(task, OwnedStripe):
            in_flight.append(_start_assembly(task, shard_of, p2p, buffers.take_buffer()))
        else:
            in_flight.append(_start_sending(task, shard_of, p2p))
    while in_flight:
        yield from _wait_for_stripe(in_flight.popleft(), p2p)


def _wait_for_stripe(
    stripe_in_flight: _InFlightStripe, p2p: P2PExchange
) -> Iterator[tuple[Sequence[FileRange], Bytes]]:
    p2p.wait(stripe_in_flight.works)
    if stripe_in_flight.buffer is not None:
        for stripe_slice, data in stripe_in_flight.incoming:
            stripe_slice.copy_in(data, _stripe_view(stripe_in_flight.buffer, stripe_in_flight.file_ranges))
        yield stripe_in_flight.file_ranges, stripe_in_flight.buffer


def _start_sending(task: RemoteStripe, shard_of: ShardOf, p2p: P2PExchange) -> _InFlightStripe:
    return _InFlightStripe([p2p.send(_contribution_bytes(shard_of(task.tensor), task.contribution), task.owner)])


def _start_assembly(task: OwnedStripe, shard_of: ShardOf, p2p: P2PExchange, buffer: Bytes) -> _InFlightStripe:
    file_ranges = task.file_ranges
    works, incoming = [], []
    for contribution, stripe_slice in task.contributions:
        if contribution.sender == p2p.rank:
            stripe_slice.copy_in(
                _contribution_bytes(shard_of(file_ranges[0].tensor), contribution), _stripe_view(buffer, file_ranges)
            )
            continue
        data = np.empty(contribution.size, np.uint8)
        works.append(p2p.receive(data, contribution.sender))
        incoming.append((stripe_slice, data))
    return _InFlightStripe(works, file_ranges, buffer, incoming)


def _contribution_bytes(shard: TensorBytes, contribution: ShardContribution) -> Bytes:
    data = shard.view(contribution.local, contribution.local + contribution.size)
    if data is None:
        data = np.empty(contribution.size, np.uint8)
        shard.copy_out(contribution.local, data)
    return data


def _stripe_view(buffer: Bytes, file_ranges: Sequence[FileRange]) -> Bytes:
    """Return the stripe in its buffer: it begins as far from a page's start as in the file."""
    lead = file_ranges[0].offset % SECTOR_BYTES
    size = max(file_range.local + file_range.stop - file_range.start for file_range in file_ranges)
    return buffer[lead : lead + size]


def _slice_range(stripe: Bytes, file_range: FileRange) -> Bytes:
    return stripe[file_range.local : file_range.local + file_range.stop - file_range.start]


def _write_stripe(
    file_ranges: Sequence[FileRange], stripe: Bytes, writers: WriterPool, cells: CellExchange
) -> list[tuple[int, Fragment]]:
    fragments: list[tuple[int, Fragment]] = []
    for file_range in file_ranges:
        kept, cut = cut_out([file_range], cells.sent)
        for kept_range in kept:
            data = _same_page_offset(_slice_range(stripe, kept_range), kept_range)
            writers.write(kept_range.file, kept_range.offset, data.data)
        for transfer, (sent_range,) in cut:
            cells.pack_bytes(transfer, sent_range, _slice_range(stripe, sent_range))
        fragments += hash_fragments(file_range, _slice_range(stripe, file_range))
    return fragments


def _same_page_offset(data: Bytes, file_range: FileRange) -> Bytes:
    """Return bytes that begin as far from a page's start as in the file: a copy if necessary."""
    lead = file_range.offset % SECTOR_BYTES
    if data.ctypes.data % SECTOR_BYTES == lead:
        return data
    copy = aligned_buffer(lead + len(data))[lead:]
    np.copyto(copy, data)
    return copy
