"""Stripes: ranges of a tensor's bytes where many ranks hold many small ranges. Pure functions.

A stripe is assembled in memory from the contributions of all ranks, or distributed to them, so that storage sees one
large request. Stripes are boxes of the tensor, so that a rank's part of one is moved by strided copies.

:mod:`rankless.engine.plan.stripe_owners` divides tensors with it on every rank. All ranks must get the same stripes
from the same shape. They are not stored: a load may use other sizes than the save.

Only the owner of a stripe needs the geometry of all shards in it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from rankless.engine.plan.element_ranges import ElementRange
from rankless.engine.plan.shard_byte_ranges import LocalShard, count_below
from rankless.storage.aligned_memory import Bytes

#: The most bytes of a stripe.
STRIPE = 8 * 2**20

#: A shard with shorter ranges than this, in bytes, is moved in stripes (measured: see docs/design/decisions.md).
NARROW = 256 * 2**10

#: One index range of each axis of a box: in the stripe, and in the shard's part of it.
_SlicePair = tuple[tuple[slice, ...], tuple[slice, ...]]


def is_narrow(shard: LocalShard) -> bool:
    """Return whether the ranges of a shard are too short to be moved one by one."""
    return 0 < shard.mean_range_bytes < min(NARROW, shard.nbytes)


def split_into_stripes(shape: tuple[int, ...]) -> Iterator[ElementRange]:
    """Yield the stripes of a tensor with shards of ``shape``, in order.

    For example, 4096 rows of 8192 bytes are 4 stripes of 1024 rows each.
    """
    if not math.prod(shape):
        return
    axis, row = _split_axis(shape)
    step = max(1, STRIPE // row)
    for outer in range(math.prod(shape[:axis])):
        for start in range(0, shape[axis], step):
            stop = min(shape[axis], start + step)
            yield ElementRange((outer * shape[axis] + start) * row, (outer * shape[axis] + stop) * row)


def count_stripes(shape: tuple[int, ...]) -> int:
    """Return the number of stripes of a tensor with shards of ``shape``."""
    if not math.prod(shape):
        return 0
    axis, row = _split_axis(shape)
    return math.prod(shape[:axis]) * math.ceil(shape[axis] / max(1, STRIPE // row))


def _split_axis(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the first axis where one index fits into a stripe, and the bytes of such an index."""
    axis, row = 0, math.prod(shape[1:])
    while row > STRIPE:
        axis += 1
        row //= shape[axis]
    return axis, max(1, row)


class StripeSlice(NamedTuple):
    """The part of a stripe that belongs to a shard: an array of ``shape``, in boxes of an array of ``box``."""

    box: tuple[int, ...]
    shape: tuple[int, ...]
    slices: tuple[_SlicePair, ...]

    def copy_in(self, shard_slice: Bytes, stripe: Bytes) -> None:
        """Copy the shard's part into the stripe."""
        self._copy_boxes(shard_slice, stripe, into_stripe=True)

    def copy_out(self, stripe: Bytes, shard_slice: Bytes) -> None:
        """Copy the shard's part out of the stripe."""
        self._copy_boxes(shard_slice, stripe, into_stripe=False)

    def _copy_boxes(self, shard_slice: Bytes, stripe: Bytes, *, into_stripe: bool) -> None:
        unit = self._copy_unit()
        stripe_array = stripe.view(f"u{unit}").reshape(*self.box[:-1], self.box[-1] // unit)
        shard_array = shard_slice.view(f"u{unit}").reshape(*self.shape[:-1], self.shape[-1] // unit)
        for in_stripe, in_slice in self.slices:
            stripe_box, shard_box = stripe_array[_in_units(in_stripe, unit)], shard_array[_in_units(in_slice, unit)]
            np.copyto(stripe_box, shard_box) if into_stripe else np.copyto(shard_box, stripe_box)

    def _copy_unit(self) -> int:
        """Return the bytes that can be copied at a time: short rows are copied far faster by words than by bytes."""
        edges = [edge for both in self.slices for axes in both for edge in (axes[-1].start, axes[-1].stop)]
        return math.gcd(8, self.box[-1], self.shape[-1], *edges)


def stripe_slice(shard: LocalShard, stripe: ElementRange) -> StripeSlice:
    """Return the part of a stripe that belongs to a shard."""
    axis, row = _split_axis(shard.shape)
    first, last = stripe.start // row % shard.shape[axis], (stripe.stop - stripe.start) // row
    segments = [_clip_segments(shard.segments[axis], first, first + last), *shard.segments[axis + 1 :]]
    bases = [count_below(shard.segments[axis], first), *(0 for _ in segments[1:])]
    starts = [first, *(0 for _ in segments[1:])]
    axes = [
        [
            (
                slice(low - start, high - start),
                slice(count_below(axis_segments, low) - base, count_below(axis_segments, high) - base),
            )
            for low, high in inside
        ]
        for inside, axis_segments, base, start in zip(segments, shard.segments[axis:], bases, starts, strict=True)
    ]
    slices = tuple(
        (tuple(in_stripe for in_stripe, _ in combination), tuple(in_slice for _, in_slice in combination))
        for combination in itertools.product(*axes)
    )
    shape = (sum(high - low for low, high in segments[0]), *shard.index_counts[axis + 1 :])
    return StripeSlice((last, *shard.shape[axis + 1 :]), shape, slices)


def _clip_segments(segments: tuple[ElementRange, ...], start: int, stop: int) -> tuple[ElementRange, ...]:
    """Return the parts of segments that are in ``[start, stop)``."""
    clipped = (ElementRange(max(low, start), min(high, stop)) for low, high in segments)
    return tuple(clipped_range for clipped_range in clipped if clipped_range.start < clipped_range.stop)


def _in_units(slices: tuple[slice, ...], unit: int) -> tuple[slice, ...]:
    """Convert the slice of the last axis from bytes to units."""
    last = slices[-1]
    return (*slices[:-1], slice(last.start // unit, last.stop // unit))
