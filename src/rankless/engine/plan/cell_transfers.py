"""Bytes of files that one rank sends to another, which writes them. Pure functions.

A rank sends few ranges, and receives few, unless the shards of a tensor are tiny: then the rank that writes a cell
receives a few bytes from each of thousands of ranks. So received ranges are columns of numbers.

:mod:`rankless.engine.plan.writer_cells` makes the transfers of a save,
:mod:`rankless.engine.plan.writer_cells_of_parts` the transfers of a drain, and :mod:`rankless.engine.io.cell_exchange`
executes them, all on each rank for itself. Sender and receiver must have the same transfers in the same order: a
message has no headers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rankless.engine.plan.file_ranges import FileRange

Numbers = NDArray[np.int64]
SmallNumbers = NDArray[np.int32]


class CellTransfer(NamedTuple):
    """Bytes ``[start, stop)`` of file number ``file`` that this rank sends to, or receives from, another rank."""

    file: int
    start: int
    stop: int
    rank: int


class TransferTable(NamedTuple):
    """Transfers as columns, in the order of the files: see :class:`CellTransfer`.

    A rank may have millions, for as long as it keeps the plan: so small numbers have 32 bits.
    """

    files: SmallNumbers
    starts: Numbers
    stops: Numbers
    ranks: SmallNumbers

    @classmethod
    def of_columns(cls, files: Numbers, starts: Numbers, stops: Numbers, ranks: Numbers) -> TransferTable:
        """Return a table of columns in any integer type."""
        return cls(files.astype(np.int32), starts, stops, ranks.astype(np.int32))

    @property
    def sizes(self) -> Numbers:
        """The number of bytes of each transfer."""
        return self.stops - self.starts

    def select_rows(self, selection: Numbers | NDArray[np.bool_]) -> TransferTable:
        """Return some of the rows."""
        files, starts, stops, ranks = self
        return TransferTable(files[selection], starts[selection], stops[selection], ranks[selection])

    def to_transfers(self) -> list[CellTransfer]:
        """Return the rows."""
        return [CellTransfer(*row) for row in zip(*(column.tolist() for column in self), strict=True)]


def tabulate_transfers(transfers: Sequence[CellTransfer], tables: Iterable[TransferTable] = ()) -> TransferTable:
    """Return all transfers as one table in the order of the files. No two of them overlap.

    The rows of each of ``tables`` are in this order. If no other transfer is between them, rows are not sorted: one
    rank of a job of 16,384 has 12 million.
    """
    ordered, parts, done = sorted(transfers), list[TransferTable](), 0
    for table in sorted((table for table in tables if len(table.files)), key=_first_position):
        stop = bisect_left(ordered, _first_position(table))
        parts += [_tabulate_rows(ordered[done:stop]), table]
        done = stop
    parts.append(_tabulate_rows(ordered[done:]))
    joined = TransferTable(*map(np.concatenate, zip(*parts, strict=True)))
    if _are_ordered(joined):
        return joined
    return joined.select_rows(np.lexsort((joined.starts, joined.files)))


def _are_ordered(table: TransferTable) -> bool:
    is_later = (table.files[1:] == table.files[:-1]) & (table.starts[1:] >= table.starts[:-1])
    return bool(np.all(is_later | (table.files[1:] > table.files[:-1])))


def _first_position(table: TransferTable) -> tuple[int, int]:
    return int(table.files[0]), int(table.starts[0])


def _tabulate_rows(transfers: Sequence[CellTransfer]) -> TransferTable:
    return TransferTable.of_columns(*np.array(transfers, np.int64).reshape(-1, len(TransferTable._fields)).T)


def cut_out(
    file_ranges: Sequence[FileRange], sent: Sequence[CellTransfer]
) -> tuple[list[FileRange], list[tuple[CellTransfer, list[FileRange]]]]:
    """Divide ranges into those that the rank writes, and the ranges that make up each transfer.

    Both arguments are in the order of the files. A transfer without any bytes in ``file_ranges`` is left out.

    :mod:`rankless.save.shard_writer`, :mod:`rankless.engine.io.write_stripes` and
    :mod:`rankless.engine.io.upload_parts` call it on each rank before they write.
    """
    kept: list[FileRange] = []
    cut: dict[CellTransfer, list[FileRange]] = {}
    number = 0
    for file_range in file_ranges:
        rest = file_range
        while number < len(sent) and (sent[number].file, sent[number].stop) <= (rest.file, rest.offset):
            number += 1
        following = number
        while following < len(sent) and sent[following].file == rest.file:
            transfer = sent[following]
            skip = max(0, transfer.start - rest.offset)
            if skip >= rest.stop - rest.start:
                break
            size = min(transfer.stop - rest.offset, rest.stop - rest.start) - skip
            if skip:
                kept.append(rest.slice_bytes(0, skip))
            cut.setdefault(transfer, []).append(rest.slice_bytes(skip, size))
            rest = rest.slice_bytes(skip + size, rest.stop - rest.start - skip - size)
            following += 1
        if rest.start < rest.stop:
            kept.append(rest)
    return kept, list(cut.items())
