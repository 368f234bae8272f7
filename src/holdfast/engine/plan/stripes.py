"""Stripes: ranges of a tensor's bytes in which many ranks hold many small runs. Pure functions.

Such a range is put together in memory from what each rank holds of it (or taken apart), so that storage sees
one large request. Stripes are boxes of the tensor, so that a rank's share of one is moved by strided copies.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from holdfast.engine.plan.ranges import ElementRange
from holdfast.engine.plan.shards import LocalShard, count_below
from holdfast.storage.memory import Bytes

#: The most bytes of a stripe.
STRIPE = 8 * 2**20

#: A part whose runs are shorter, in bytes, goes through stripes (measured: see docs/design.md).
NARROW = 256 * 2**10

#: One index range of each axis of a box, in it and in the part's share of it.
_Slices = tuple[tuple[slice, ...], tuple[slice, ...]]


def is_narrow(part: LocalShard) -> bool:
    """Whether the runs of a part are too short to be moved one by one."""
    return 0 < part.run_length < min(NARROW, part.nbytes)


def split_into_stripes(shape: tuple[int, ...]) -> Iterator[ElementRange]:
    """The stripes of a tensor whose parts have ``shape``, in order."""
    if not math.prod(shape):
        return
    axis, row = _cut_axis(shape)
    step = max(1, STRIPE // row)
    for outer in range(math.prod(shape[:axis])):
        for start in range(0, shape[axis], step):
            stop = min(shape[axis], start + step)
            yield ElementRange((outer * shape[axis] + start) * row, (outer * shape[axis] + stop) * row)


def _cut_axis(shape: tuple[int, ...]) -> tuple[int, int]:
    """The first axis an index of which fits into a stripe, and the bytes of such an index."""
    axis, row = 0, math.prod(shape[1:])
    while row > STRIPE:
        axis += 1
        row //= shape[axis]
    return axis, max(1, row)


class StripeSlice(NamedTuple):
    """Where a part's share of a stripe lies: as an array of ``shape``, in boxes of an array of ``box``."""

    box: tuple[int, ...]
    shape: tuple[int, ...]
    slices: tuple[_Slices, ...]

    def put(self, share: Bytes, stripe: Bytes) -> None:
        """Copy the share into the stripe."""
        self._copy(share, stripe, out=True)

    def take(self, stripe: Bytes, share: Bytes) -> None:
        """Copy the share out of the stripe."""
        self._copy(share, stripe, out=False)

    def _copy(self, share: Bytes, stripe: Bytes, *, out: bool) -> None:
        unit = self._unit()
        whole = stripe.view(f"u{unit}").reshape(*self.box[:-1], self.box[-1] // unit)
        mine = share.view(f"u{unit}").reshape(*self.shape[:-1], self.shape[-1] // unit)
        for in_stripe, in_share in self.slices:
            left, right = whole[_units(in_stripe, unit)], mine[_units(in_share, unit)]
            np.copyto(left, right) if out else np.copyto(right, left)

    def _unit(self) -> int:
        """Bytes that can be copied at a time: short rows go far faster by words than by bytes."""
        edges = [edge for both in self.slices for axes in both for edge in (axes[-1].start, axes[-1].stop)]
        return math.gcd(8, self.box[-1], self.shape[-1], *edges)


def stripe_slice(part: LocalShard, stripe: ElementRange) -> StripeSlice:
    """Where the part's share lies in a stripe."""
    axis, row = _cut_axis(part.shape)
    first, last = stripe.start // row % part.shape[axis], (stripe.stop - stripe.start) // row
    segments = [_within(part.segments[axis], first, first + last), *part.segments[axis + 1 :]]
    bases = [count_below(part.segments[axis], first), *(0 for _ in segments[1:])]
    starts = [first, *(0 for _ in segments[1:])]
    axes = [
        [
            (slice(low - start, high - start), slice(count_below(whole, low) - base, count_below(whole, high) - base))
            for low, high in inside
        ]
        for inside, whole, base, start in zip(segments, part.segments[axis:], bases, starts, strict=True)
    ]
    slices = tuple(
        (tuple(one for one, _ in chosen), tuple(other for _, other in chosen)) for chosen in itertools.product(*axes)
    )
    shape = (sum(high - low for low, high in segments[0]), *part.counts[axis + 1 :])
    return StripeSlice((last, *part.shape[axis + 1 :]), shape, slices)


def _within(segments: tuple[ElementRange, ...], start: int, stop: int) -> tuple[ElementRange, ...]:
    cut = (ElementRange(max(low, start), min(high, stop)) for low, high in segments)
    return tuple(run for run in cut if run.start < run.stop)


def _units(slices: tuple[slice, ...], unit: int) -> tuple[slice, ...]:
    last = slices[-1]
    return (*slices[:-1], slice(last.start // unit, last.stop // unit))
