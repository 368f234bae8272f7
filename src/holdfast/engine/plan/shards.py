"""The part of a tensor that a rank holds, in bytes. Pure functions.

Sharding selects indices of a dimension in ascending order, so a rank's part, read row by row, is its runs one
after another: any range of the tensor is, of a part, one range of the rank's own memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from holdfast.engine.plan.placements import Coordinate, Division, FlatSharded, Sharded
from holdfast.engine.plan.ranges import ElementRange, merge_ranges
from holdfast.ondisk.dtypes import dtype_width
from holdfast.ondisk.files import TensorInfo


@dataclass(frozen=True)
class LocalShard:
    """What one rank holds of a tensor: on each axis of ``shape`` some segments of indices, and all combinations.

    Axes are the tensor's dimensions with those that are never cut apart folded into the one before;
    the last counts bytes. ``shape`` is the same for all parts of one division.
    """

    shape: tuple[int, ...]
    segments: tuple[tuple[ElementRange, ...], ...]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many indices of each axis it has."""
        return tuple(sum(stop - start for start, stop in axis) for axis in self.segments)

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.counts)

    def runs(self) -> Iterator[ElementRange]:
        """Its runs in bytes of the tensor, ascending."""
        if len(self.shape) == 1:  # merged already, as the segments of every axis are
            return iter(self.segments[0])
        return merge_ranges(_product(self.shape, self.segments))

    @property
    def run_length(self) -> int:
        """About how many bytes its runs have."""
        number, whole = 1, True
        for size, count, segments in zip(
            reversed(self.shape), reversed(self.counts), reversed(self.segments), strict=True
        ):
            number = len(segments) if whole else number * count
            whole = whole and count == size
        return self.nbytes // number if number else 0

    def before(self, position: int) -> int:
        """How many of its bytes lie before byte ``position`` of the tensor."""
        mine, inner, found = self.nbytes, math.prod(self.shape), 0
        if not mine:
            return 0
        for size, count, segments in zip(self.shape, self.counts, self.segments, strict=True):
            inner //= size
            mine //= count
            index, position = divmod(position, inner)
            found += mine * count_below(segments, index)
            if not any(start <= index < stop for start, stop in segments):
                break
        return found


def count_below(segments: tuple[ElementRange, ...], index: int) -> int:
    """How many indices of some segments are below ``index``."""
    return sum(min(stop, index) - start for start, stop in segments if start < index)


@lru_cache(maxsize=4096)
def local_shard(info: TensorInfo, division: Division, coordinate: Coordinate) -> LocalShard:
    """The part at ``coordinate`` of a tensor that is divided so. The only part of an undivided one is all of it."""
    size = dtype_width(info.dtype)
    if not division:
        return LocalShard((info.nbytes,), (_segment(0, info.nbytes),))
    if isinstance(flat := division[0][1], FlatSharded):
        return _flat_part(info, flat, coordinate[0])
    dims = [_segment(0, size) for size in info.shape]
    for (parts, placement), at in zip(division, coordinate, strict=True):
        if isinstance(placement, Sharded):
            dims[placement.dim] = _shard(dims[placement.dim], placement.split, parts, at)
    cut = sorted({placement.dim for _, placement in division if isinstance(placement, Sharded)})
    return _folded(info.shape, size, dims, cut)


def _flat_part(info: TensorInfo, flat: FlatSharded, at: int) -> LocalShard:
    size = dtype_width(info.dtype)
    numel = info.nbytes // size
    start, stop = (min(max(edge * flat.length - flat.offset, 0), numel) for edge in (at, at + 1))
    return LocalShard((info.nbytes,), (_segment(start * size, stop * size),))


def _folded(shape: tuple[int, ...], size: int, dims: list[tuple[ElementRange, ...]], cut: list[int]) -> LocalShard:
    """Fold every dimension that is not cut into the one before it, and the element's bytes into the last."""
    firsts = cut if cut[0] == 0 else [0, *cut]
    axes, segments = [], []
    for first, following in zip(firsts, [*firsts[1:], len(shape)], strict=True):
        last = following == len(shape)
        inner = math.prod(shape[first + 1 : following]) * (size if last else 1)
        axes.append(shape[first] * inner)
        segments.append(tuple(merge_ranges(ElementRange(start * inner, stop * inner) for start, stop in dims[first])))
    return LocalShard(tuple(axes), tuple(segments))


def _segment(start: int, stop: int) -> tuple[ElementRange, ...]:
    return (ElementRange(start, stop),) if start < stop else ()


def _shard(segments: tuple[ElementRange, ...], split: int, parts: int, at: int) -> tuple[ElementRange, ...]:
    """One part of a dimension's indices: cut in ``split`` chunks, each in ``parts``, as ``torch.chunk`` cuts."""
    total = sum(stop - start for start, stop in segments)
    chosen = []
    for start, stop in _chunks(total, split):
        piece = _chunks(stop - start, parts)[at]
        chosen.append(ElementRange(start + piece.start, start + piece.stop))
    return _select(segments, chosen)


def _chunks(total: int, parts: int) -> list[ElementRange]:
    step = -(-total // parts)
    return [ElementRange(min(total, i * step), min(total, (i + 1) * step)) for i in range(parts)]


def _select(segments: tuple[ElementRange, ...], chosen: list[ElementRange]) -> tuple[ElementRange, ...]:
    """The parts of ``segments`` at the positions ``chosen`` among all their indices."""
    result, base = [], 0
    for start, stop in segments:
        for first, last in chosen:
            low, high = max(first - base, 0), min(last - base, stop - start)
            if low < high:
                result.append(ElementRange(start + low, start + high))
        base += stop - start
    return tuple(merge_ranges(result))


def _product(shape: tuple[int, ...], segments: tuple[tuple[ElementRange, ...], ...]) -> Iterator[ElementRange]:
    if len(shape) == 1:
        yield from segments[0]
        return
    inner = math.prod(shape[1:])
    if all(axis == _segment(0, size) for size, axis in zip(shape[1:], segments[1:], strict=True)):
        yield from (ElementRange(start * inner, stop * inner) for start, stop in segments[0])
        return
    rest = list(merge_ranges(_product(shape[1:], segments[1:])))
    for start, stop in segments[0]:
        for row in range(start, stop):
            yield from (ElementRange(row * inner + run.start, row * inner + run.stop) for run in rest)
