"""The part of a tensor that a rank holds, in bytes. Pure functions.

Sharding selects indices of a dimension in ascending order, so a rank's part, read row by row, is its runs one
after another: any range of the tensor is, of a part, one range of the rank's own memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from holdfast.engine.layouts import Coordinate, Division, Flat, Shard
from holdfast.engine.runs import Run, merged
from holdfast.layout.dtypes import width
from holdfast.layout.files import TensorInfo


@dataclass(frozen=True)
class Part:
    """What one rank holds of a tensor: on each axis of ``shape`` some segments of indices, and all combinations.

    Axes are the tensor's dimensions with those that are never cut apart folded into the one before;
    the last counts bytes. ``shape`` is the same for all parts of one division.
    """

    shape: tuple[int, ...]
    segments: tuple[tuple[Run, ...], ...]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many indices of each axis it has."""
        return tuple(sum(stop - start for start, stop in axis) for axis in self.segments)

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.counts)

    def runs(self) -> Iterator[Run]:
        """Its runs in bytes of the tensor, ascending."""
        if len(self.shape) == 1:  # merged already, as the segments of every axis are
            return iter(self.segments[0])
        return merged(_product(self.shape, self.segments))

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
            found += mine * below(segments, index)
            if not any(start <= index < stop for start, stop in segments):
                break
        return found


def below(segments: tuple[Run, ...], index: int) -> int:
    """How many indices of some segments are below ``index``."""
    return sum(min(stop, index) - start for start, stop in segments if start < index)


@lru_cache(maxsize=4096)
def part(info: TensorInfo, division: Division, coordinate: Coordinate) -> Part:
    """The part at ``coordinate`` of a tensor that is divided so. The only part of an undivided one is all of it."""
    size = width(info.dtype)
    if not division:
        return Part((info.nbytes,), (_segment(0, info.nbytes),))
    if isinstance(flat := division[0][1], Flat):
        return _flat_part(info, flat, coordinate[0])
    dims = [_segment(0, size) for size in info.shape]
    for (parts, placement), at in zip(division, coordinate, strict=True):
        if isinstance(placement, Shard):
            dims[placement.dim] = _shard(dims[placement.dim], placement.split, parts, at)
    cut = sorted({placement.dim for _, placement in division if isinstance(placement, Shard)})
    return _folded(info.shape, size, dims, cut)


def _flat_part(info: TensorInfo, flat: Flat, at: int) -> Part:
    size = width(info.dtype)
    numel = info.nbytes // size
    start, stop = (min(max(edge * flat.length - flat.offset, 0), numel) for edge in (at, at + 1))
    return Part((info.nbytes,), (_segment(start * size, stop * size),))


def _folded(shape: tuple[int, ...], size: int, dims: list[tuple[Run, ...]], cut: list[int]) -> Part:
    """Fold every dimension that is not cut into the one before it, and the element's bytes into the last."""
    firsts = cut if cut[0] == 0 else [0, *cut]
    axes, segments = [], []
    for first, following in zip(firsts, [*firsts[1:], len(shape)], strict=True):
        last = following == len(shape)
        inner = math.prod(shape[first + 1 : following]) * (size if last else 1)
        axes.append(shape[first] * inner)
        segments.append(tuple(merged(Run(start * inner, stop * inner) for start, stop in dims[first])))
    return Part(tuple(axes), tuple(segments))


def _segment(start: int, stop: int) -> tuple[Run, ...]:
    return (Run(start, stop),) if start < stop else ()


def _shard(segments: tuple[Run, ...], split: int, parts: int, at: int) -> tuple[Run, ...]:
    """One part of a dimension's indices: cut in ``split`` chunks, each in ``parts``, as ``torch.chunk`` cuts."""
    total = sum(stop - start for start, stop in segments)
    chosen = []
    for start, stop in _chunks(total, split):
        piece = _chunks(stop - start, parts)[at]
        chosen.append(Run(start + piece.start, start + piece.stop))
    return _select(segments, chosen)


def _chunks(total: int, parts: int) -> list[Run]:
    step = -(-total // parts)
    return [Run(min(total, i * step), min(total, (i + 1) * step)) for i in range(parts)]


def _select(segments: tuple[Run, ...], chosen: list[Run]) -> tuple[Run, ...]:
    """The parts of ``segments`` at the positions ``chosen`` among all their indices."""
    result, base = [], 0
    for start, stop in segments:
        for first, last in chosen:
            low, high = max(first - base, 0), min(last - base, stop - start)
            if low < high:
                result.append(Run(start + low, start + high))
        base += stop - start
    return tuple(merged(result))


def _product(shape: tuple[int, ...], segments: tuple[tuple[Run, ...], ...]) -> Iterator[Run]:
    if len(shape) == 1:
        yield from segments[0]
        return
    inner = math.prod(shape[1:])
    if all(axis == _segment(0, size) for size, axis in zip(shape[1:], segments[1:], strict=True)):
        yield from (Run(start * inner, stop * inner) for start, stop in segments[0])
        return
    rest = list(merged(_product(shape[1:], segments[1:])))
    for start, stop in segments[0]:
        for row in range(start, stop):
            yield from (Run(row * inner + run.start, row * inner + run.stop) for run in rest)
