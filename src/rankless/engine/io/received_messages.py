"""The messages that a rank receives from the ranks of other hosts, and their bytes in the order of the files.

The shards of a small tensor of 16,384 ranks have a few bytes each, so that a rank may receive 12 million transfers, a
few bytes of each tensor from each rank. Such transfers are regular: for each tensor the senders come in the same order,
and send equally many bytes. So they are handled as series, for example ``(file 3, position 0, senders 0 to 16383, 2
bytes each)``: one strided copy out of messages that lie one after another in memory.

:mod:`rankless.engine.io.cell_exchange` has one object for each exchange, in the thread that writes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rankless.engine.plan.cell_transfers import Numbers, SmallNumbers, TransferTable
from rankless.storage.aligned_memory import Bytes

#: About the most bytes of small transfers in one run. Runs of irregular transfers take 16 times as much for indices.
_RUN_BYTES = 2**20

#: The bytes of a line of the processor's cache.
_WINDOW_BYTES = 64

#: The most groups of senders that have a window at a time: a tensor has few.
_MOST_WINDOWS = 4

#: Transfers of this many bytes are not copied out of their messages.
_MIN_UNCOPIED = 64 * 2**10

#: The transfers that are looked at together. Columns of 12 million transfers take longer to allocate than to fill.
_CHUNK_ROWS = 2**16

#: Series must have this many transfers on average, or the transfers are gathered by their indices.
_MIN_SERIES = 8


class ReceivedRun(NamedTuple):
    """Received bytes that are adjacent in a file."""

    file: int
    start: int
    data: Bytes


class _Series(NamedTuple):
    """Transfers of equal sizes, adjacent in a file, by ``senders`` ranks whose numbers increase by one."""

    file: int
    start: int
    first_sender: int
    senders: int
    size: int


class _Window(NamedTuple):
    """The next bytes of the messages of some senders, from ``starts`` on: a line of the processor's cache of each.

    So a message is not read again for each of its transfers: of 12 million reads of a few bytes, most miss the cache.
    """

    starts: Numbers
    data: Bytes

    def has_slices(self, starts: Numbers, size: int) -> bool:
        """Return whether the window has ``size`` bytes of each message, equally far behind its beginning."""
        passed = starts - self.starts
        return bool(passed[0] + size <= _WINDOW_BYTES and (passed == passed[0]).all())

    def find_slices(self, starts: Numbers) -> Numbers:
        """Return the places in the window of bytes that begin at ``starts`` in the messages."""
        return np.arange(len(starts)) * _WINDOW_BYTES + int(starts[0] - self.starts[0])


class ReceivedMessages:
    """Memory for the messages of all senders, by rank in ``by_rank``. Each has ``trailer_bytes`` after its transfers.

    A message has the transfers of its sender in the order of the files.
    """

    def __init__(self, transfers: TransferTable, trailer_bytes: int) -> None:
        self._transfers = transfers
        ranks = _order_senders(transfers.ranks)
        self._number_of = np.zeros(max(ranks, default=-1) + 1, np.int32)
        self._number_of[ranks] = np.arange(len(ranks))
        count, total = len(transfers.ranks), int(transfers.stops.sum() - transfers.starts.sum())
        self._has_large = total >= _MIN_UNCOPIED * count
        firsts = self._find_series()
        self._series: list[_Series] | None = None
        if self._has_large or count >= _MIN_SERIES * len(firsts):
            self._series = self._describe_series(firsts)
        lengths = self._count_bytes(len(ranks)) + trailer_bytes
        stops = np.cumsum(lengths)
        self._starts = stops - lengths
        self._data: Bytes = np.empty(lengths.sum() + _WINDOW_BYTES, np.uint8)  # a window may end behind a message
        places = zip(ranks, self._starts.tolist(), stops.tolist(), strict=True)
        self.by_rank = {rank: self._data[start:stop] for rank, start, stop in places}

    def runs(self) -> Iterator[ReceivedRun]:
        """Yield the received bytes in the order of the files. All messages must have arrived."""
        yield from self._gather_transfers() if self._series is None else self._take_series(self._series)

    def _find_series(self) -> Numbers:
        """Return the first transfer of each series. A series has no large transfers, or is one."""
        firsts = []
        for rows in _divide(len(self._transfers.ranks), overlap=1):
            files, starts, stops, ranks = (column[rows] for column in self._transfers)
            senders, sizes = self._number_of[ranks], stops - starts
            is_next = (files[1:] == files[:-1]) & (starts[1:] == stops[:-1]) & (sizes[1:] == sizes[:-1])
            is_next &= (senders[1:] - senders[:-1] == 1) & (sizes[1:] < _MIN_UNCOPIED)
            firsts.append(np.flatnonzero(~is_next) + rows.start + 1)
        return np.concatenate([np.arange(min(1, len(self._transfers.ranks))), *firsts])

    def _describe_series(self, firsts: Numbers) -> list[_Series]:
        counts = np.diff(firsts, append=len(self._transfers.ranks))
        files, starts, stops, ranks = self._transfers.select_rows(firsts)
        columns = (files, starts, self._number_of[ranks], counts, stops - starts)
        return [_Series(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]

    def _count_bytes(self, count: int) -> Numbers:
        """Return the bytes of each of ``count`` senders."""
        if self._series is None:
            senders = self._number_of[self._transfers.ranks]
            return np.bincount(senders, self._transfers.sizes, count).astype(np.int64)
        totals = np.zeros(count, np.int64)
        for _, _, sender, number, size in self._series:
            totals[sender : sender + number] += size
        return totals

    def _take_series(self, all_series: Sequence[_Series]) -> Iterator[ReceivedRun]:
        places, windows = self._starts.copy(), dict[tuple[int, int], _Window]()
        for series in all_series:
            first, number, size = series.first_sender, series.senders, series.size
            data, starts = self._data, places[first : first + number]
            if number > 1 and size <= _WINDOW_BYTES // 2:
                window = windows.pop((first, number), None)
                if window is None or not window.has_slices(starts, size):
                    window = _Window(starts.copy(), _take_slices(self._data, starts, _WINDOW_BYTES))
                windows = dict([*windows.items(), ((first, number), window)][-_MOST_WINDOWS:])
                data, starts = window.data, window.find_slices(starts)
            yield from _copy_series(series, data, starts)
            places[first : first + number] += size

    def _gather_transfers(self) -> Iterator[ReceivedRun]:
        files, starts, stops, ranks = self._transfers
        sizes, senders = self._transfers.sizes, self._number_of[ranks]
        order = _order_by_sender(senders)
        before = np.cumsum(sizes[order]) - sizes[order]
        is_first = np.diff(senders[order], prepend=-1) > 0
        places = np.empty_like(sizes)
        places[order] = before - np.repeat(before[is_first] - self._starts, np.bincount(senders))
        is_first = (files[1:] != files[:-1]) | (starts[1:] != stops[:-1])
        is_first |= np.diff(np.cumsum(sizes) // _RUN_BYTES) > 0
        edges = [0, *(np.flatnonzero(is_first) + 1).tolist(), len(sizes)]
        for first, stop in itertools.pairwise(edges):
            data = _gather_slices(self._data, places[first:stop], sizes[first:stop])
            yield ReceivedRun(int(files[first]), int(starts[first]), data)


def _copy_series(series: _Series, data: Bytes, starts: Numbers) -> Iterator[ReceivedRun]:
    """Yield the bytes of a series in runs, given the place of each sender's bytes in ``data``."""
    step = max(1, _RUN_BYTES // series.size)
    for done in range(0, series.senders, step):
        taken = _take_slices(data, starts[done : done + step], series.size)
        yield ReceivedRun(series.file, series.start + done * series.size, taken)


def _divide(count: int, overlap: int = 0) -> Iterator[slice]:
    """Yield slices of ``count`` rows. Each but the first begins with the last ``overlap`` rows of the slice before."""
    for first in range(0, count, _CHUNK_ROWS):
        yield slice(max(0, first - overlap), min(first + _CHUNK_ROWS, count))


def _order_senders(ranks: SmallNumbers) -> list[int]:
    """Return the ranks in the order of their first transfers: the number of a sender is its place in the result.

    So the numbers of a series increase by one, whatever the order of the ranks in the mesh is.
    """
    ordered: list[int] = []
    is_known = np.zeros(int(ranks.max(initial=-1)) + 1, bool)
    for rows in _divide(len(ranks)):
        unknown = ranks[rows][~is_known[ranks[rows]]]
        found, first_uses = np.unique(unknown, return_index=True)
        ordered += found[np.argsort(first_uses)].tolist()
        is_known[found] = True
    return ordered


def _order_by_sender(senders: SmallNumbers) -> Numbers:
    """Return the order of transfers by sender; one sender's keep theirs. Numbers of 16 bits are sorted fastest."""
    order: Numbers = np.argsort(senders.astype(np.uint16), kind="stable")
    if senders.max() < 2**16:
        return order
    upper = (senders[order] >> 16).astype(np.uint16)
    return order[np.argsort(upper, kind="stable")]


def _take_slices(data: Bytes, starts: Numbers, size: int) -> Bytes:
    """Return slices of equal sizes one after another. ``starts`` increase. Items of any size are copied fastest."""
    if len(starts) == 1:
        return data[starts[0] : starts[0] + size]
    steps, item = np.diff(starts), np.dtype(f"V{size}")
    if (steps == steps[0]).all():
        return np.ndarray(len(starts), item, data, int(starts[0]), (int(steps[0]),)).copy().view(np.uint8)
    at_each_byte = np.ndarray(len(data) - size + 1, item, data, 0, (1,))
    taken: Bytes = at_each_byte[starts].view(np.uint8)
    return taken


def _gather_slices(data: Bytes, starts: Numbers, sizes: Numbers) -> Bytes:
    """Return slices of ``data`` one after another."""
    if len(starts) == 1:
        return data[starts[0] : starts[0] + sizes[0]]
    stops = np.cumsum(sizes)
    gathered: Bytes = data[np.repeat(starts - (stops - sizes), sizes) + np.arange(stops[-1])]
    return gathered
