"""Ranges of bytes of tensors as columns of numbers. A shard that is written in stripes may have millions of them.

:mod:`rankless.engine.integrity.base_comparison` uses them on each rank, to hash the bytes that an incremental save may
share.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from rankless.engine.plan.file_ranges import CHUNK, FileRange
from rankless.engine.plan.save_plan import StripedShard, TensorSpan

_Positions = NDArray[np.int64]


class TensorRanges(NamedTuple):
    """Ranges: the number of the tensor, and the bytes ``[start, stop)`` of it."""

    tensor: NDArray[np.uint32]
    start: NDArray[np.uint64]
    stop: NDArray[np.uint64]

    @classmethod
    def of_file_ranges(cls, file_ranges: Iterable[FileRange]) -> Self:
        """Return some ranges of files."""
        rows = np.array([(part.tensor, part.start, part.stop) for part in file_ranges], np.int64).reshape(-1, 3)
        return cls(rows[:, 0].astype(np.uint32), rows[:, 1].astype(np.uint64), rows[:, 2].astype(np.uint64))

    @classmethod
    def of_striped_shard(cls, striped: StripedShard) -> Self:
        """Return the ranges of a shard, in the order of the shard's bytes.

        No range crosses the boundary of a chunk of the tensor as it is stored.
        """
        start, stop = striped.shard.range_columns()
        tensors, starts, stops = [], [], []
        for span in striped.spans:
            low, high = _split_at_chunks(*_clip_to_span(start, stop, span))
            tensors.append(np.full(len(low), span.tensor, np.uint32))
            starts.append(low.astype(np.uint64))
            stops.append(high.astype(np.uint64))
        return cls(np.concatenate(tensors), np.concatenate(starts), np.concatenate(stops))


def _clip_to_span(start: _Positions, stop: _Positions, span: TensorSpan) -> tuple[_Positions, _Positions]:
    """Return the parts of ranges that are in a span, as positions in the stored tensor."""
    low, high = np.maximum(start, span.start), np.minimum(stop, span.stop)
    kept, shift = low < high, span.at - span.start
    return low[kept] + shift, high[kept] + shift


def _split_at_chunks(start: _Positions, stop: _Positions) -> tuple[_Positions, _Positions]:
    first, last = start // CHUNK, (stop - 1) // CHUNK
    counts = last - first + 1
    row = np.repeat(np.arange(len(start)), counts)
    chunk = first[row] + np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.maximum(start[row], chunk * CHUNK), np.minimum(stop[row], (chunk + 1) * CHUNK)
