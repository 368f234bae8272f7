"""The messages that a rank receives from the ranks of other hosts, and their bytes in the order of the files.

The shards of a small tensor of 16,384 ranks have a few bytes each, so that a rank may receive 12 million transfers, a
few bytes of each tensor from each rank. Such transfers are regular: for each tensor the senders come in the same order,
and send equally many bytes. So they are handled as series, for example ``(file 3, position 0, senders 0 to 16383, 2
bytes each)``: one strided copy out of messages that lie one after another in memory.

:mod:`rankless.engine.io.cell_exchange` has one object for each exchange, in the thread that writes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from rankless.engine.plan.cell_transfers import Numbers, SmallNumbers, TransferTable
from rankless.storage.aligned_memory import Bytes

#: About the most bytes of small transfers in one run. Runs of irregular transfers take 16 times as much for indices.
_RUN_BYTES = 2**20

#: Transfers of this many bytes are not copied out of their messages.
_MIN_UNCOPIED = 64 * 2**10

#: Series must have this many transfers on average, or the transfers are gathered by their indices.
_MIN_SERIES = 8


class ReceivedRun(NamedTuple):
    """Received bytes that are adjacent in a file."""

    file: int
    start: int
    data: Bytes


class ReceivedMessages:
    """Memory for the messages of all senders, by rank in ``by_rank``. Each has ``trailer_bytes`` after its transfers.

    A message has the transfers of its sender in the order of the files.
    """

    def __init__(self, transfers: TransferTable, trailer_bytes: int) -> None:
        self._transfers, self._sizes = transfers, transfers.sizes
        self._senders, ranks = _number_senders(transfers.ranks)
        self._firsts = self._find_series()
        has_large = len(self._sizes) and self._sizes.mean() >= _MIN_UNCOPIED
        self._is_regular = bool(has_large) or len(self._sizes) >= _MIN_SERIES * len(self._firsts)
        lengths = self._count_bytes(len(ranks)) + trailer_bytes
        stops = np.cumsum(lengths)
        self._starts = stops - lengths
        self._data: Bytes = np.empty(lengths.sum(), np.uint8)
        places = zip(ranks, self._starts.tolist(), stops.tolist(), strict=True)
        self.by_rank = {rank: self._data[start:stop] for rank, start, stop in places}

    def runs(self) -> Iterator[ReceivedRun]:
        """Yield the received bytes in the order of the files. All messages must have arrived."""
        yield from self._take_series() if self._is_regular else self._gather_transfers()

    def _find_series(self) -> Numbers:
        """Return the first transfer of each series: adjacent ones of equal sizes, by one sender after another."""
        files, starts, stops, _ = self._transfers
        is_next = (files[1:] == files[:-1]) & (starts[1:] == stops[:-1]) & (self._sizes[1:] == self._sizes[:-1])
        is_next &= (self._senders[1:] - self._senders[:-1] == 1) & (self._sizes[1:] < _MIN_UNCOPIED)
        return np.flatnonzero(np.concatenate([[True], ~is_next])[: len(files)])

    def _iterate_series(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield the first transfer, the first sender, the number of transfers and their bytes for each series."""
        counts = np.diff(np.concatenate([self._firsts, [len(self._sizes)]])).tolist()
        senders, sizes = (column[self._firsts].tolist() for column in (self._senders, self._sizes))
        yield from zip(self._firsts.tolist(), senders, counts, sizes, strict=True)

    def _count_bytes(self, count: int) -> Numbers:
        """Return the bytes of each of ``count`` senders."""
        if not self._is_regular:
            return np.bincount(self._senders, self._sizes, count).astype(np.int64)
        totals = np.zeros(count, np.int64)
        for _, sender, number, size in self._iterate_series():
            totals[sender : sender + number] += size
        return totals

    def _take_series(self) -> Iterator[ReceivedRun]:
        places = self._starts.copy()
        files, starts = (column[self._firsts].tolist() for column in self._transfers[:2])
        for file, start, (_, sender, count, size) in zip(files, starts, self._iterate_series(), strict=True):
            step = max(1, _RUN_BYTES // size)
            for done in range(0, count, step):
                taken = places[sender + done : sender + min(done + step, count)]
                yield ReceivedRun(file, start + done * size, _take_slices(self._data, taken, size))
            places[sender : sender + count] += size

    def _gather_transfers(self) -> Iterator[ReceivedRun]:
        files, starts, stops, _ = self._transfers
        sizes, order = self._sizes, _order_by_sender(self._senders)
        before = np.cumsum(sizes[order]) - sizes[order]
        is_first = np.diff(self._senders[order], prepend=-1) > 0
        places = np.empty_like(sizes)
        places[order] = before - np.repeat(before[is_first] - self._starts, np.bincount(self._senders))
        is_first = (files[1:] != files[:-1]) | (starts[1:] != stops[:-1])
        is_first |= np.diff(np.cumsum(sizes) // _RUN_BYTES) > 0
        edges = [0, *(np.flatnonzero(is_first) + 1).tolist(), len(sizes)]
        for first, stop in itertools.pairwise(edges):
            data = _gather_slices(self._data, places[first:stop], sizes[first:stop])
            yield ReceivedRun(int(files[first]), int(starts[first]), data)


def _number_senders(ranks: SmallNumbers) -> tuple[SmallNumbers, list[int]]:
    """Return a number for the sender of each transfer, and the rank of each number. The first sender is number 0.

    So the numbers of a series increase by one, whatever the order of the ranks in the mesh is.
    """
    if not len(ranks):
        return ranks, []
    first = np.full(int(ranks.max()) + 1, len(ranks))
    first[ranks[::-1]] = np.arange(len(ranks))[::-1]
    order = np.argsort(first, kind="stable")[: np.count_nonzero(first < len(ranks))]
    number_of = np.zeros(len(first), np.int32)
    number_of[order] = np.arange(len(order))
    return number_of[ranks], order.tolist()


def _order_by_sender(senders: SmallNumbers) -> Numbers:
    """Return the order of transfers by sender; one sender's keep theirs. Numbers of 16 bits are sorted fastest."""
    order: Numbers = np.argsort(senders.astype(np.uint16), kind="stable")
    if senders.max() < 2**16:
        return order
    upper = (senders[order] >> 16).astype(np.uint16)
    return order[np.argsort(upper, kind="stable")]


def _take_slices(data: Bytes, starts: Numbers, size: int) -> Bytes:
    """Return slices of equal sizes one after another. ``starts`` increase. Items of a few bytes are copied fastest."""
    if len(starts) == 1:
        return data[starts[0] : starts[0] + size]
    steps = np.diff(starts)
    if (steps == steps[0]).all():
        items = np.ndarray(len(starts), f"V{size}", data, int(starts[0]), (int(steps[0]),))
        return items.copy().view(np.uint8)
    taken: Bytes = data[(starts[:, np.newaxis] + np.arange(size)).reshape(-1)]
    return taken


def _gather_slices(data: Bytes, starts: Numbers, sizes: Numbers) -> Bytes:
    """Return slices of ``data`` one after another."""
    if len(starts) == 1:
        return data[starts[0] : starts[0] + sizes[0]]
    stops = np.cumsum(sizes)
    gathered: Bytes = data[np.repeat(starts - (stops - sizes), sizes) + np.arange(stops[-1])]
    return gathered
