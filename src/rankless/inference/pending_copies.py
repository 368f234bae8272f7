"""Copies of stored elements into tensors that were noted, and not executed yet.

:class:`~rankless.inference.weights_loader.WeightsLoader` has one on each rank. Copies into the same memory must not be
in one batch: their order would be lost.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from rankless.engine.plan.element_ranges import ElementRange
from rankless.inference.strided_view import StridedView, describe_view


class ElementCopy(NamedTuple):
    """A copy of the elements ``view`` of the stored tensor with the number ``tensor`` into ``target``.

    ``dtype`` is the dtype of the elements. ``target`` has the dimensions of the view first, in its order, and then
    dimensions with the same elements at all indices.
    """

    tensor: int
    view: StridedView
    dtype: torch.dtype
    target: torch.Tensor


def make_copy(tensor: int, meta: torch.Tensor, target: torch.Tensor) -> ElementCopy | None:
    """Describe a copy of the elements of a view ``meta`` of a stored tensor, as ``target.copy_(view)`` means it.

    Return ``None`` if the elements of the view are mixed, see :func:`describe_view`.
    """
    source, width = meta.expand(target.shape), meta.element_size()
    strides = [stride * width for stride in source.stride()]
    described = describe_view(int(source.storage_offset()) * width, width, source.shape, strides)
    if described is None:
        return None
    view, axes = described
    others = [axis for axis in range(target.ndim) if axis not in axes]
    return ElementCopy(tensor, view, meta.dtype, target.detach().permute((*axes, *others)))


def memory_of(tensor: torch.Tensor) -> ElementRange:
    """Return the addresses of the storage of a tensor: from the first byte to the byte after the last one."""
    storage = tensor.untyped_storage()
    return ElementRange(storage.data_ptr(), storage.data_ptr() + storage.nbytes())


class FilledMemory:
    """The memory that copies fill: parts that are apart from each other, or, as columns of a matrix, interleaved.

    It goes by addresses: tensors may share memory without sharing a storage.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._apart: list[tuple[ElementRange, torch.Tensor]] = []
        self._interleaved: list[tuple[ElementRange, torch.Tensor]] = []

    def add(self, target: torch.Tensor) -> bool:
        """Add a part, and return ``True``; return ``False`` if it may have elements of another part."""
        span = _span(target)
        place = bisect.bisect_right(self._starts, span.start)
        around = self._apart[max(place - 1, 0) : place + 1]
        if not _overlapping(span, (*around, *self._interleaved)):
            self._starts.insert(place, span.start)
            self._apart.insert(place, (span, target))
            return True
        if any(not _are_disjoint(target, other) for other in _overlapping(span, (*self._apart, *self._interleaved))):
            return False
        self._interleaved.append((span, target))
        return True

    def overlaps(self, memory: ElementRange) -> bool:
        """Return whether a part is in a range of addresses."""
        place = bisect.bisect_left(self._starts, memory.stop)
        before = self._apart[place - 1 : place] if place else []
        return bool(_overlapping(memory, (*before, *self._interleaved)))


class PendingCopies:
    """The copies that were noted, in their order."""

    def __init__(self) -> None:
        self._copies: list[ElementCopy] = []
        self.filled = FilledMemory()
        self.nbytes = 0

    def __bool__(self) -> bool:
        return bool(self._copies)

    def add(self, copy: ElementCopy) -> bool:
        """Add a copy, and return ``True``; do nothing if it may fill memory that another one fills."""
        if copy.target.numel() and not self.filled.add(copy.target):
            return False
        self._copies.append(copy)
        self.nbytes += copy.view.nbytes
        return True

    def take(self) -> tuple[list[ElementCopy], FilledMemory]:
        """Return all copies and the memory that they fill, and forget them."""
        taken = self._copies, self.filled
        self._copies, self.filled, self.nbytes = [], FilledMemory(), 0
        return taken


def _overlapping(span: ElementRange, parts: Iterable[tuple[ElementRange, torch.Tensor]]) -> list[torch.Tensor]:
    return [part for other, part in parts if other.start < span.stop and span.start < other.stop]


def _span(target: torch.Tensor) -> ElementRange:
    """Return the addresses from the first element of a tensor to the end of its last one."""
    width, start = target.element_size(), target.data_ptr()
    reach = sum((size - 1) * stride for size, stride in zip(target.shape, target.stride(), strict=True))
    return ElementRange(start, start + (reach + 1) * width if target.numel() else start)


def _are_disjoint(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors of one storage are boxes of the same grid that have no element in common."""
    if first.dtype != second.dtype or first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr():
        return False
    grid = sorted({stride for tensor in (first, second) for stride in _grid_strides(tensor)}, reverse=True)
    if any(larger % smaller for larger, smaller in itertools.pairwise(grid)):
        return False
    ranges = [list(_grid_ranges(tensor, grid)) for tensor in (first, second)]
    if any(
        axis and one.stop * grid[axis] > grid[axis - 1] for of_tensor in ranges for axis, one in enumerate(of_tensor)
    ):
        return False  # a box that reaches over the end of a row of the grid
    return any(one.stop <= other.start or other.stop <= one.start for one, other in zip(*ranges, strict=True))


def _grid_strides(tensor: torch.Tensor) -> Iterator[int]:
    return (stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def _grid_ranges(tensor: torch.Tensor, grid: list[int]) -> Iterator[ElementRange]:
    """Yield the indices of a box in each dimension of a grid."""
    sizes = {stride: size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1}
    offset = int(tensor.storage_offset())
    for stride in grid:
        index, offset = divmod(offset, stride)
        yield ElementRange(index, index + sizes.get(stride, 1))
