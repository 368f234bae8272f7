"""The comparison of the tensors of two checkpoints, which are read in parallel, buffer by buffer, and verified.

:mod:`rankless.inspection.compare` calls it, in one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np

from rankless.engine.plan.element_ranges import TensorRange
from rankless.inspection.bits_to_floats import Bits
from rankless.inspection.element_differences import ChangeMetrics, measure_change
from rankless.inspection.inspected_checkpoint import InspectedCheckpoint
from rankless.inspection.read_elements import TensorSide, split_segments
from rankless.inspection.tensor_pairs import TensorPair
from rankless.process.worker_threads import run_in_threads

#: The number of slices per read.
_SLICES = 8


@dataclass(slots=True)
class TensorDifference:
    """The difference of two tensors. See :class:`rankless.inspection.element_differences.ChangeMetrics`."""

    elements: int
    differing: int = 0
    absolute: float = 0.0
    relative: float = 0.0


def compare_tensors(
    tensor_pairs: Sequence[TensorPair],
    left: InspectedCheckpoint,
    right: InspectedCheckpoint,
    done: Callable[[int], None],
) -> list[TensorDifference]:
    """Compare pairs of tensors of equal shapes. ``done`` is called with the number of bytes that were read.

    Raises ``CorruptCheckpointError`` if bytes do not match their checksums.
    """
    sides = (
        TensorSide(left, [pair.left for pair in tensor_pairs]),
        TensorSide(right, [pair.right for pair in tensor_pairs]),
    )
    totals = [TensorDifference(math.prod(info.shape)) for info in sides[0].infos]
    dtypes = list(zip(*([info.dtype for info in side.infos] for side in sides), strict=True))
    slices = split_segments([total.elements for total in totals], dtypes)
    while batch := list(islice(slices, _SLICES)):
        bits = [side.read_slices(batch) for side in sides]
        dtype_pairs = [dtypes[segments[0].tensor] for segments in batch]
        tasks = list(zip(batch, zip(*bits, strict=True), dtype_pairs, strict=True))
        for segments, metrics in zip(batch, run_in_threads(lambda task: _compare_segment(*task), tasks), strict=True):
            _add_difference(totals, segments, metrics)
        done(sum(array.nbytes for array in chain(*bits)))
    for side in sides:
        side.verify_partial_blocks()
    return totals


def _compare_segment(
    segments: Sequence[TensorRange], bits: tuple[Bits, Bits], dtypes: tuple[str, str]
) -> ChangeMetrics:
    starts = np.cumsum([0, *(segment.size for segment in segments[:-1])])
    return measure_change(*bits, dtypes, starts)


def _add_difference(
    totals: Sequence[TensorDifference], segments: Sequence[TensorRange], metrics: ChangeMetrics
) -> None:
    for segment, differing, absolute, relative in zip(segments, *(column.tolist() for column in metrics), strict=True):
        total = totals[segment.tensor]
        total.differing += differing
        total.absolute = max(total.absolute, absolute)
        total.relative = max(total.relative, relative)
