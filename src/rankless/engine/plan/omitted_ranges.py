"""Ranges of files that a save need not write, because the files have these bytes already. Pure functions.

A rank that omits a range omits all work for it: its own writes, stripes, and the exchange with other hosts. All ranks
omit the same ranges, so sends and receives still match.

:mod:`rankless.save.incremental` calls :func:`omit_ranges` on every rank after the vote "finding unchanged bytes", with
the ranges that rank 0 has decided there. The stripes and transfers that are left must be the same on sender and
receiver.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from rankless.engine.plan.cell_transfers import CellTransfer, TransferTable, tabulate_transfers
from rankless.engine.plan.element_ranges import ElementRange
from rankless.engine.plan.file_ranges import FileRange
from rankless.engine.plan.save_plan import SavePlan
from rankless.engine.plan.stripe_owners import StripeTask
from rankless.ondisk.data_files import DataFile

#: A position after the last byte of every file.
_END = 2**62

#: Ranges of bytes by the number of the file: ascending, and neither overlapping nor adjacent.
OmittedRanges = Mapping[int, Sequence[ElementRange]]


def whole_files(files: Sequence[DataFile], numbers: Iterable[int]) -> OmittedRanges:
    """Return the ranges that are whole files, by their numbers."""
    return {number: [ElementRange(0, files[number].size)] for number in numbers}


def omit_ranges(plan: SavePlan, omitted: OmittedRanges) -> SavePlan:
    """Return the plan without the work for some ranges of files.

    A stripe is written whole if any of its bytes is.
    """
    if not omitted:
        return plan
    return replace(
        plan,
        file_ranges=[part for file_range in plan.file_ranges for part in _remaining_ranges(file_range, omitted)],
        stripe_tasks=[task for task in plan.stripe_tasks if _is_written(task, omitted)],
        sent=[part for transfer in plan.sent for part in _remaining_transfers(transfer, omitted)],
        received=_remaining_received(plan.received, omitted),
    )


def _remaining_received(received: TransferTable, omitted: OmittedRanges) -> TransferTable:
    """Return the transfers without the omitted bytes. Only those that are cut are looked at one by one."""
    is_kept, is_cut = np.ones(len(received.files), bool), np.zeros(len(received.files), bool)
    for file, ranges in omitted.items():
        first, last = np.searchsorted(received.files, (file, file + 1))
        starts, stops = received.starts[first:last], received.stops[first:last]
        lows, highs = np.array([*ranges, (_END, _END)], np.int64).T
        number = np.searchsorted(highs, starts, "right")
        is_touched, is_covered = lows[number] < stops, (lows[number] <= starts) & (highs[number] >= stops)
        is_kept[first:last], is_cut[first:last] = ~is_touched, is_touched & ~is_covered
    parts = [
        part
        for transfer in received.select_rows(is_cut).to_transfers()
        for part in _remaining_transfers(transfer, omitted)
    ]
    return tabulate_transfers(parts, [received.select_rows(is_kept)])


def _remaining_ranges(file_range: FileRange, omitted: OmittedRanges) -> Iterator[FileRange]:
    for start, stop in _subtract(file_range.offset, file_range.offset + _size(file_range), file_range.file, omitted):
        yield file_range.slice_bytes(start - file_range.offset, stop - start)


def _remaining_transfers(transfer: CellTransfer, omitted: OmittedRanges) -> Iterator[CellTransfer]:
    for start, stop in _subtract(transfer.start, transfer.stop, transfer.file, omitted):
        yield transfer._replace(start=start, stop=stop)


def _is_written(task: StripeTask, omitted: OmittedRanges) -> bool:
    return any(True for file_range in task.file_ranges for _ in _remaining_ranges(file_range, omitted))


def _subtract(start: int, stop: int, file: int, omitted: OmittedRanges) -> Iterator[ElementRange]:
    """Yield the parts of bytes ``[start, stop)`` of a file that are not omitted."""
    ranges = omitted.get(file, ())
    for low, high in ranges[bisect_right(ranges, start, key=lambda omitted_range: omitted_range.stop) :]:
        if low >= stop:
            break
        if start < low:
            yield ElementRange(start, low)
        start = high
    if start < stop:
        yield ElementRange(start, stop)


def _size(file_range: FileRange) -> int:
    return file_range.stop - file_range.start
