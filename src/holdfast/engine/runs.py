"""Runs: which contiguous ranges of a tensor, in row-major order, a rank holds. Pure functions.

A layout is the mesh of ranks and a placement per mesh dimension, as in DTensor. Sharding selects
indices of a dimension in ascending order, so a rank's local part, read row by row, is its runs one
after another.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import msgspec


class Run(NamedTuple):
    """A contiguous range ``[start, stop)`` of a tensor; in elements here, in bytes in the engine's plans."""

    start: int
    stop: int


class Box(NamedTuple):
    """A rectangular part of a tensor: its first index and its extent in each dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


class Placement(msgspec.Struct, frozen=True, array_like=True):
    """How one mesh dimension divides a tensor: ``dim`` is the dimension sharded, ``None`` replicates.

    ``split`` is the split factor of a ``_StridedShard``; 1 is a plain ``Shard``.
    """

    dim: int | None = None
    split: int = 1


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """Where the parts of a tensor are: ``ranks`` is the mesh, flattened row-major."""

    mesh: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: tuple[Placement, ...]

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """The rank's place in the mesh; ``None`` when it has none and so holds nothing."""
        if rank not in self.ranks:
            return None
        place = self.ranks.index(rank)
        return tuple(place // math.prod(self.mesh[i + 1 :]) % self.mesh[i] for i in range(len(self.mesh)))

    def holders(self, rank: int) -> tuple[int, ...]:
        """The ranks, ascending, that hold the same part as ``rank`` does."""
        coordinate = self.coordinate(rank)
        if coordinate is None:
            return ()
        axes = [
            range(size) if placement.dim is None else (at,)
            for size, placement, at in zip(self.mesh, self.placements, coordinate, strict=True)
        ]
        return tuple(sorted(self.ranks[self._flat(place)] for place in itertools.product(*axes)))

    def _flat(self, coordinate: tuple[int, ...]) -> int:
        flat = 0
        for size, at in zip(self.mesh, coordinate, strict=True):
            flat = flat * size + at
        return flat


@lru_cache(maxsize=65536)
def local_runs(shape: tuple[int, ...], layout: Layout, rank: int) -> tuple[Run, ...]:
    """The runs of a tensor of ``shape`` that ``rank`` holds, ascending, in elements."""
    coordinate = layout.coordinate(rank)
    if coordinate is None:
        return ()
    segments = [[Run(0, size)] if size else [] for size in shape]
    for size, placement, at in zip(layout.mesh, layout.placements, coordinate, strict=True):
        if placement.dim is not None:
            segments[placement.dim] = _shard(segments[placement.dim], placement.split, size, at)
    return tuple(_merge(_product(shape, segments)))


def _shard(segments: list[Run], split: int, parts: int, part: int) -> list[Run]:
    """One part of a dimension's indices: cut in ``split`` chunks, each in ``parts``, as ``torch.chunk`` cuts."""
    total = sum(stop - start for start, stop in segments)
    chosen = []
    for start, stop in _chunks(total, split):
        piece = _chunks(stop - start, parts)[part]
        chosen.append(Run(start + piece.start, start + piece.stop))
    return _select(segments, chosen)


def _chunks(total: int, parts: int) -> list[Run]:
    step = -(-total // parts)
    return [Run(min(total, i * step), min(total, (i + 1) * step)) for i in range(parts)]


def _select(segments: list[Run], chosen: list[Run]) -> list[Run]:
    """The parts of ``segments`` at the positions ``chosen`` among all their indices."""
    result, base = [], 0
    for start, stop in segments:
        for first, last in chosen:
            low, high = max(first - base, 0), min(last - base, stop - start)
            if low < high:
                result.append(Run(start + low, start + high))
        base += stop - start
    return list(_merge(iter(result)))


def _product(shape: tuple[int, ...], segments: list[list[Run]]) -> Iterator[Run]:
    """The runs of a box given by segments of indices for each dimension, in row-major order."""
    if not shape:
        yield Run(0, 1)
        return
    inner = math.prod(shape[1:])
    if _whole(shape[1:], segments[1:]):
        yield from (Run(start * inner, stop * inner) for start, stop in segments[0])
        return
    rest = list(_merge(_product(shape[1:], segments[1:])))
    for start, stop in segments[0]:
        for row in range(start, stop):
            yield from (Run(row * inner + run.start, row * inner + run.stop) for run in rest)


def _whole(shape: tuple[int, ...], segments: list[list[Run]]) -> bool:
    return all(parts == [Run(0, size)] for size, parts in zip(shape, segments, strict=True))


def _merge(runs: Iterator[Run]) -> Iterator[Run]:
    """Neighbouring runs as one; empty ones left out."""
    current: Run | None = None
    for run in runs:
        if run.start == run.stop:
            continue
        if current is not None and current.stop == run.start:
            current = Run(current.start, run.stop)
            continue
        if current is not None:
            yield current
        current = run
    if current is not None:
        yield current


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The boxes that make up elements ``[start, stop)`` of a tensor of ``shape``, in row-major order.

    At most two for each dimension but the last; the way back from a run to indices of a tensor.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    inner = math.prod(shape[1:])
    first, last = start // inner, (stop - 1) // inner
    if first == last:
        yield from _in_row(shape, first, start - first * inner, stop - first * inner)
        return
    if start % inner:
        yield from _in_row(shape, first, start - first * inner, inner)
        first += 1
    full = stop // inner
    if first < full:
        yield Box((first, *(0 for _ in shape[1:])), (full - first, *shape[1:]))
    if stop % inner:
        yield from _in_row(shape, full, 0, stop - full * inner)


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Box]:
    for box in boxes(shape[1:], start, stop):
        yield Box((row, *box.offset), (1, *box.shape))
