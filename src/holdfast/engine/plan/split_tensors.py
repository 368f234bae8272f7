"""Tensors that are stored in parts, each under a name of its own. Pure functions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from functools import lru_cache

import msgspec

from holdfast.engine.plan.ranges import ElementRange, merge_ranges
from holdfast.ondisk.dtypes import dtype_width
from holdfast.ondisk.files import TensorInfo

#: In so many ranges a tensor may be split: to plan and write more takes minutes.
_FINEST = 2**16


class SplitLayout(msgspec.Struct, frozen=True, array_like=True):
    """Elements of a tensor, and the stored tensor that they are in.

    They are those of a strided view (``offset``, ``size``, ``stride``, counted in elements) of the tensor, in row-major
    order. The stored tensor is called ``name`` and has the ``shape``; they are in it from element ``at`` on.
    """

    name: str
    shape: tuple[int, ...]
    at: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def runs(self) -> Iterator[ElementRange]:
        """The ranges of elements of the tensor, in the order in which they are stored."""
        block, axes = self._blocks
        steps = (range(0, size * step, step) if step else [0] * size for size, step in axes)
        starts = (self.offset + sum(place) for place in itertools.product(*steps))
        return merge_ranges(ElementRange(start, start + block) for start in starts)

    @property
    def count(self) -> int:
        """The most ranges that there are."""
        return math.prod(size for size, _ in self._blocks[1])

    @property
    def _blocks(self) -> tuple[int, list[tuple[int, int]]]:
        """The elements that are one range for sure, and size and step of each axis of such ranges."""
        axes = [(size, step) for size, step in zip(self.size, self.stride, strict=True) if size != 1]
        block = 1
        while axes and axes[-1][1] == block:
            block *= axes.pop()[0]
        return block, axes


#: The splits of a tensor; none where it is stored under its own name.
Splits = tuple[SplitLayout, ...]


def stored_tensors(name: str, info: TensorInfo, splits: Splits) -> dict[str, TensorInfo]:
    """What a tensor is stored as."""
    return {split.name: TensorInfo(info.dtype, split.shape) for split in splits} if splits else {name: info}


def split_ranges(info: TensorInfo, splits: Splits) -> Iterator[tuple[ElementRange, str, int]]:
    """Ranges of bytes of a tensor with the name of the stored tensor that each is in, and where in that it starts."""
    size = dtype_width(info.dtype)
    for split in splits:
        reached = split.at * size
        for start, stop in split.runs():
            yield ElementRange(start * size, stop * size), split.name, reached
            reached += (stop - start) * size


def split_tiles(numel: int, splits: Splits) -> bool:
    """Whether every element of a tensor is in one of its splits, once; and not too many ranges are made of it."""
    if sum(split.count for split in splits) > _FINEST:
        return False
    return _tiles(numel, tuple((split.offset, split.size, split.stride) for split in splits))


@lru_cache(maxsize=256)
def _tiles(numel: int, views: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]) -> bool:
    runs = sorted(run for view in views for run in SplitLayout("", (), 0, *view).runs())
    reached = [0, *(stop for _, stop in runs)]
    return reached[:-1] == [start for start, _ in runs] and reached[-1] == numel


def is_whole(names: Iterable[str], shape: tuple[int, ...]) -> Splits:
    """The splits of a tensor that is stored whole under several names."""
    return tuple(SplitLayout(name, shape, 0, 0, (math.prod(shape),), (1,)) for name in names)
