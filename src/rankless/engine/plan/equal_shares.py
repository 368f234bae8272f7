"""Division of the I/O among ranks that hold the same bytes: equal shares of large, adjacent ranges.

The plans of saves and the conversions by several ranks call it on each rank for itself. The shares of all holders must
be disjoint and cover everything: the result may depend on the arguments only.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

from rankless.engine.plan.file_ranges import FileRange

#: Holders of one range do not split it into ranges smaller than this, in bytes. A multiple of the sector size.
MIN_SHARE = 2**20


def split_evenly(file_ranges: Sequence[FileRange], index: int, count: int, grain: int = 0) -> Sequence[FileRange]:
    """Return share number ``index`` of ``count`` shares: ranges adjacent in their files, about equally many bytes.

    A boundary inside a range leaves at least ``grain`` bytes on both sides and falls on a multiple of it in the file.
    ``grain`` is at least :data:`MIN_SHARE`. For example, a range of 8 MiB at offset 0 gives two shares of 4 MiB each,
    and a range of 1 MiB belongs to one share.

    Plans of saves call it for bytes that several ranks hold (:mod:`rankless.engine.plan.save_plan`), and conversions to
    divide their work.
    """
    grain = max(grain, MIN_SHARE)
    if count == 1 or not file_ranges:
        return file_ranges
    ends = list(itertools.accumulate(file_range.stop - file_range.start for file_range in file_ranges))
    low, high = (_find_cut(file_ranges, ends, ends[-1] * share // count, grain) for share in (index, index + 1))
    first = bisect.bisect_right(ends, low)
    result = []
    for file_range, end in zip(file_ranges[first:], ends[first:], strict=True):
        size = file_range.stop - file_range.start
        start = end - size
        if start >= high:
            break
        skip, keep = max(low - start, 0), min(high - start, size)
        result.append(file_range.slice_bytes(skip, keep - skip))
    return result


def _find_cut(file_ranges: Sequence[FileRange], ends: Sequence[int], ideal: int, grain: int) -> int:
    """Return a boundary of shares near ``ideal``, in bytes over all ranges."""
    number = bisect.bisect_right(ends, ideal)
    if number == len(file_ranges):
        return ends[-1]
    size = file_ranges[number].stop - file_ranges[number].start
    start = ends[number] - size
    offset = file_ranges[number].offset
    cut_in_range = (offset + ideal - start) // grain * grain - offset
    if cut_in_range < grain:
        return start
    return start + cut_in_range if size - cut_in_range >= grain else ends[number]
