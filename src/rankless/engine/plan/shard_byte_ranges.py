"""The shard of a tensor that a rank holds, as ranges of bytes: of the tensor, and of files. Pure functions.

Sharding selects indices of a dimension in ascending order. So a rank's shard, in row-major order, consists of its
ranges of the tensor one after another: the part of it that is in a range of the tensor is one range of the shard.

The plans of saves, loads and live copies ask :func:`local_shard` on every rank, for the own shard and for the shards of
other ranks. It must divide as torch does, also if a dimension is not divisible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rankless.engine.plan.element_ranges import ElementRange, IndexBox, merge_ranges
from rankless.engine.plan.file_ranges import FileRange
from rankless.engine.plan.layout_types import BoxSharded, Coordinate, Division, FlatSharded, Placement, Sharded
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.dtypes import dtype_width

#: Returns the file ranges of bytes ``[start, stop)`` of a tensor; their ``local`` counts from ``start``.
Locate = Callable[[int, int], Sequence[FileRange]]


class LocalShard(msgspec.Struct, frozen=True, dict=True):
    """The bytes of a tensor that one rank holds: all combinations of some segments of indices on each axis.

    The axes of ``shape`` are the dimensions of the tensor; those that are never split are folded into the one before.
    The last axis counts bytes. ``shape`` is the same for all shards of one division. For example, the left half of a
    float32 tensor of shape ``(2, 8)`` has the shape ``(2, 32)``, and the segments ``[0, 2)`` and ``[0, 16)``.
    """

    shape: tuple[int, ...]
    segments: tuple[tuple[ElementRange, ...], ...]

    @cached_property
    def index_counts(self) -> tuple[int, ...]:
        """The number of indices on each axis."""
        return tuple(sum(stop - start for start, stop in axis) for axis in self.segments)

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return math.prod(self.index_counts)

    def iter_ranges(self) -> Iterator[ElementRange]:
        """Return the ranges of bytes of the tensor, ascending.

        For example, the left half of a float32 tensor of shape ``(2, 8)`` has bytes ``[0, 16)`` and ``[32, 48)``.
        """
        if len(self.shape) == 1:  # merged already, as the segments of every axis are
            return iter(self.segments[0])
        return merge_ranges(_iter_product(self.shape, self.segments))

    def range_columns(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the starts and the stops of its ranges as columns, ascending; some neighbours are not merged."""
        starts, stops = _segment_columns(self.segments[-1])
        inner = self.shape[-1]
        for size, segments in zip(reversed(self.shape[:-1]), reversed(self.segments[:-1]), strict=True):
            firsts, lasts = _segment_columns(segments)
            if starts.tolist() == [0] and stops.tolist() == [inner]:
                starts, stops = firsts * inner, lasts * inner
            else:
                indices = [np.arange(first, last) for first, last in segments] or [firsts]
                origins = np.concatenate(indices)[:, None] * inner
                starts, stops = (origins + starts).reshape(-1), (origins + stops).reshape(-1)
            inner *= size
        return starts, stops

    @property
    def mean_range_bytes(self) -> int:
        """The mean size of the ranges in bytes, approximately."""
        range_count, whole = 1, True
        for size, count, segments in zip(
            reversed(self.shape), reversed(self.index_counts), reversed(self.segments), strict=True
        ):
            range_count = len(segments) if whole else range_count * count
            whole = whole and count == size
        return self.nbytes // range_count if range_count else 0

    def bytes_before(self, position: int) -> int:
        """Return the number of bytes of the shard that are before byte ``position`` of the tensor.

        For example, the right half of a float32 tensor of shape ``(2, 8)`` has 16 bytes before byte 40.
        """
        bytes_per_index, inner, total = self.nbytes, math.prod(self.shape), 0
        if not bytes_per_index:
            return 0
        for size, count, segments in zip(self.shape, self.index_counts, self.segments, strict=True):
            inner //= size
            bytes_per_index //= count
            index, position = divmod(position, inner)
            total += bytes_per_index * count_below(segments, index)
            if not any(start <= index < stop for start, stop in segments):
                break
        return total


def count_below(segments: tuple[ElementRange, ...], index: int) -> int:
    """Return the number of indices in the segments that are below ``index``."""
    return sum(min(stop, index) - start for start, stop in segments if start < index)


@lru_cache(maxsize=4096)
def local_shard(info: TensorInfo, division: Division, coordinate: Coordinate) -> LocalShard:
    """Return the shard at ``coordinate`` of a tensor with this division. An undivided tensor has one: all of it."""
    size = dtype_width(info.dtype)
    if not division:
        return LocalShard((info.nbytes,), (_make_segments(0, info.nbytes),))
    if isinstance(flat := division[0][1], FlatSharded):
        return _flat_shard(info, flat, coordinate[0])
    if isinstance(boxed := division[0][1], BoxSharded):
        return _boxed_shard(info, boxed, coordinate[0])
    dims = [_make_segments(0, size) for size in info.shape]
    for (count, placement), index in zip(division, coordinate, strict=True):
        if isinstance(placement, Sharded):
            dims[placement.dim] = _shard_segments(dims[placement.dim], placement.split, count, index)
    split_dims = sorted({placement.dim for _, placement in division if isinstance(placement, Sharded)})
    return _fold_axes(info.shape, size, dims, split_dims)


class EvenShards(NamedTuple):
    """The shards of a tensor of ``nbytes`` bytes if they divide its bytes evenly, in the order of their numbers.

    Each shard is one range of ``size`` bytes. The first range begins ``shift`` bytes before the tensor, and the last
    ones may go beyond its end. For example, 10 rows of 8 bytes on 4 ranks have the ``size`` 24 and the ``shift`` 0, so
    byte 50 is in shard 2.
    """

    size: int
    shift: int
    nbytes: int

    def index_at(self, position: int) -> int:
        """Return the number of the shard that contains byte ``position`` of the tensor."""
        return (position + self.shift) // self.size

    def range_of(self, index: int) -> ElementRange:
        """Return the bytes of a shard. They must not be empty."""
        start = index * self.size - self.shift
        return ElementRange(max(start, 0), min(start + self.size, self.nbytes))


def even_shards(info: TensorInfo, division: Division) -> EvenShards | None:
    """Return the shards of a tensor, or ``None`` if they are not such shards, or the tensor is empty."""
    if len(division) != 1 or not info.nbytes:
        return None
    count, placement = division[0]
    if isinstance(placement, FlatSharded):
        size = dtype_width(info.dtype)
        return EvenShards(placement.length * size, placement.offset * size, info.nbytes)
    if not isinstance(placement, Sharded) or placement.dim or placement.split != 1:
        return None
    rows = info.shape[0]
    return EvenShards(_chunk_range(rows, count, 0).stop * (info.nbytes // rows), 0, info.nbytes)


def _flat_shard(info: TensorInfo, flat: FlatSharded, index: int) -> LocalShard:
    size = dtype_width(info.dtype)
    numel = info.nbytes // size
    start, stop = (min(max(edge * flat.length - flat.offset, 0), numel) for edge in (index, index + 1))
    return LocalShard((info.nbytes,), (_make_segments(start * size, stop * size),))


def _boxed_shard(info: TensorInfo, boxed: BoxSharded, index: int) -> LocalShard:
    """Return a shard of boxes: by axes if each shard of the tensor is one box, else as ranges of the whole tensor."""
    size = dtype_width(info.dtype)
    split_dims = sorted(
        {
            dim
            for boxes in boxed.boxes
            for dim, extents in enumerate(zip(boxes[0].shape, info.shape, strict=True))
            if extents[0] != extents[1]
        }
    )
    if split_dims and all(len(boxes) == 1 for boxes in boxed.boxes):
        (box,) = boxed.boxes[index]
        return _fold_axes(info.shape, size, _box_segments(box), split_dims)
    ranges = sorted(element_range for box in boxed.boxes[index] for element_range in _box_ranges(info.shape, size, box))
    return LocalShard((info.nbytes,), (tuple(merge_ranges(ranges)),))


def _box_segments(box: IndexBox) -> list[tuple[ElementRange, ...]]:
    return [_make_segments(start, start + extent) for start, extent in zip(box.offset, box.shape, strict=True)]


def _box_ranges(shape: tuple[int, ...], size: int, box: IndexBox) -> Iterator[ElementRange]:
    """Yield the ranges of bytes of a box."""
    segments = (*_box_segments(box), _make_segments(0, size))
    yield from merge_ranges(_iter_product((*shape, size), segments))


@lru_cache(maxsize=4096)
def shard_shape(
    shape: tuple[int, ...], placements: tuple[Placement, ...], mesh_shape: tuple[int, ...], place: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the shape of the shard that torch's rule gives to the rank at ``place`` in a mesh.

    For example, ``Sharded(0)`` over 2 ranks divides the shape ``(5, 4)`` into ``(3, 4)`` and ``(2, 4)``.
    """
    sizes = list(shape)
    for placement, count, index in zip(placements, mesh_shape, place, strict=True):
        if isinstance(placement, Sharded):
            total = sizes[placement.dim]
            chunks = (_chunk_range(total, placement.split, number) for number in range(placement.split))
            shards = (_chunk_range(stop - start, count, index) for start, stop in chunks)
            sizes[placement.dim] = sum(stop - start for start, stop in shards)
    return tuple(sizes)


def _fold_axes(
    shape: tuple[int, ...], size: int, dims: list[tuple[ElementRange, ...]], split_dims: list[int]
) -> LocalShard:
    """Fold every dimension that is not split into the one before it, and the element's bytes into the last."""
    firsts = split_dims if split_dims[0] == 0 else [0, *split_dims]
    axes, segments = [], []
    for first, next_first in zip(firsts, [*firsts[1:], len(shape)], strict=True):
        is_last = next_first == len(shape)
        inner = math.prod(shape[first + 1 : next_first]) * (size if is_last else 1)
        axes.append(shape[first] * inner)
        segments.append(tuple(merge_ranges(ElementRange(start * inner, stop * inner) for start, stop in dims[first])))
    return LocalShard(tuple(axes), tuple(segments))


def _segment_columns(segments: tuple[ElementRange, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    columns = np.array(segments, np.int64).reshape(-1, 2)
    return columns[:, 0], columns[:, 1]


def _make_segments(start: int, stop: int) -> tuple[ElementRange, ...]:
    return (ElementRange(start, stop),) if start < stop else ()


def _shard_segments(segments: tuple[ElementRange, ...], split: int, count: int, index: int) -> tuple[ElementRange, ...]:
    """Return one shard of a dimension's indices, split into ``split`` chunks and each into ``count``."""
    total = sum(stop - start for start, stop in segments)
    chosen = []
    for start, stop in (_chunk_range(total, split, number) for number in range(split)):
        chunk = _chunk_range(stop - start, count, index)
        chosen.append(ElementRange(start + chunk.start, start + chunk.stop))
    return _select_positions(segments, chosen)


def _chunk_range(total: int, count: int, index: int) -> ElementRange:
    """Return chunk number ``index`` of ``count``, of as many indices as ``torch.chunk`` takes."""
    step = -(-total // count)
    return ElementRange(min(total, index * step), min(total, (index + 1) * step))


def _select_positions(segments: tuple[ElementRange, ...], chosen: list[ElementRange]) -> tuple[ElementRange, ...]:
    """Return the parts of ``segments`` at the positions ``chosen`` among all their indices.

    For example, positions ``[1, 3)`` of the segments ``[0, 2)`` and ``[10, 12)`` are ``[1, 2)`` and ``[10, 11)``.
    """
    result, base = [], 0
    for start, stop in segments:
        for first, last in chosen:
            low, high = max(first - base, 0), min(last - base, stop - start)
            if low < high:
                result.append(ElementRange(start + low, start + high))
        base += stop - start
    return tuple(merge_ranges(result))


def _iter_product(shape: tuple[int, ...], segments: tuple[tuple[ElementRange, ...], ...]) -> Iterator[ElementRange]:
    """Yield the ranges of an array of ``shape`` that consist of the segments of all axes; neighbours are not merged."""
    if len(shape) == 1:
        yield from segments[0]
        return
    inner = math.prod(shape[1:])
    if all(axis == _make_segments(0, size) for size, axis in zip(shape[1:], segments[1:], strict=True)):
        yield from (ElementRange(start * inner, stop * inner) for start, stop in segments[0])
        return
    inner_ranges = list(merge_ranges(_iter_product(shape[1:], segments[1:])))
    for start, stop in segments[0]:
        for row in range(start, stop):
            yield from (
                ElementRange(row * inner + inner_range.start, row * inner + inner_range.stop)
                for inner_range in inner_ranges
            )


def locate_shard(shard: LocalShard, locate: Locate) -> Iterator[FileRange]:
    """Yield the ranges of a shard as ranges of files."""
    local = 0
    for start, stop in shard.iter_ranges():
        file_ranges = locate(start, stop)
        yield from (
            (file_range._replace(local=file_range.local + local) for file_range in file_ranges)
            if local
            else file_ranges
        )
        local += stop - start
