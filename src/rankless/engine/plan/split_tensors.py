"""Tensors that are stored as several tensors, each under a name of its own. Pure functions.

``state/model`` makes splits on each rank, for models with parameters that have several names or parts in a file; they
are a part of the spec. For example, one fused parameter of all experts is stored as one tensor for each expert. Plans
of saves and the readers of such files follow them: both must agree on the order of the elements.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from functools import lru_cache

import msgspec

from rankless.engine.plan.element_ranges import ElementRange, merge_ranges
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.dtypes import dtype_width

#: The most ranges that a tensor may be split into: to plan and write more takes minutes.
_MAX_RANGES = 2**16


class SplitLayout(msgspec.Struct, frozen=True, array_like=True):
    """Some elements of a tensor, and the stored tensor that contains them.

    The elements form a strided view (``offset``, ``size``, ``stride``, counted in elements) of the tensor, in row-major
    order. The stored tensor is called ``name`` and has the ``shape``; it holds them from element ``at`` on. For
    example, row 1 of a tensor of shape ``(2, 3)``, stored as a tensor of its own, has ``offset`` 3, ``size`` ``(3,)``,
    ``stride`` ``(1,)`` and ``at`` 0.
    """

    name: str
    shape: tuple[int, ...]
    at: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def iter_ranges(self) -> Iterator[ElementRange]:
        """Return the ranges of elements of the tensor, in stored order."""
        block, axes = self._block_axes
        steps = (range(0, size * step, step) if step else [0] * size for size, step in axes)
        starts = (self.offset + sum(step_offsets) for step_offsets in itertools.product(*steps))
        return merge_ranges(ElementRange(start, start + block) for start in starts)

    @property
    def max_range_count(self) -> int:
        """An upper bound of the number of ranges."""
        return math.prod(size for size, _ in self._block_axes[1])

    @property
    def _block_axes(self) -> tuple[int, list[tuple[int, int]]]:
        """The number of elements that are certainly contiguous, and size and step of each axis over such blocks."""
        axes = [(size, step) for size, step in zip(self.size, self.stride, strict=True) if size != 1]
        block = 1
        while axes and axes[-1][1] == block:
            block *= axes.pop()[0]
        return block, axes


#: The splits of a tensor; empty if it is stored under its own name.
Splits = tuple[SplitLayout, ...]


def stored_tensors(name: str, info: TensorInfo, splits: Splits) -> dict[str, TensorInfo]:
    """Return the stored tensors of a tensor: its splits, or the tensor itself."""
    return {split.name: TensorInfo(info.dtype, split.shape) for split in splits} if splits else {name: info}


def split_ranges(info: TensorInfo, splits: Splits) -> Iterator[tuple[ElementRange, str, int]]:
    """Yield byte ranges of a tensor, each with the name of the stored tensor that contains it, and its offset there."""
    size = dtype_width(info.dtype)
    for split in splits:
        reached = split.at * size
        for start, stop in split.iter_ranges():
            yield ElementRange(start * size, stop * size), split.name, reached
            reached += (stop - start) * size


def split_tiles(numel: int, splits: Splits) -> bool:
    """Return whether the splits contain every element of a tensor exactly once, and consist of few enough ranges."""
    if sum(split.max_range_count for split in splits) > _MAX_RANGES:
        return False
    return _is_exact_cover(numel, tuple((split.offset, split.size, split.stride) for split in splits))


@lru_cache(maxsize=256)
def _is_exact_cover(numel: int, views: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]) -> bool:
    ranges = sorted(element_range for view in views for element_range in SplitLayout("", (), 0, *view).iter_ranges())
    reached = [0, *(stop for _, stop in ranges)]
    return reached[:-1] == [start for start, _ in ranges] and reached[-1] == numel


def whole_splits(names: Iterable[str], shape: tuple[int, ...]) -> Splits:
    """Return the splits of a tensor that is stored whole under several names."""
    return tuple(SplitLayout(name, shape, 0, 0, (math.prod(shape),), (1,)) for name in names)
