"""Copies of stored elements into tensors that were noted, and not executed yet."""

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

    ``dtype`` is that of the elements. ``target`` has the dimensions of the view first, in its order, and then those in
    which all indices get the same elements.
    """

    tensor: int
    view: StridedView
    dtype: torch.dtype
    target: torch.Tensor

    @property
    def storage(self) -> int:
        """A number that tensors have in common if they share memory."""
        return storage_of(self.target)


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


def storage_of(tensor: torch.Tensor) -> int:
    """Return a number that tensors have in common if they share memory. It is valid as long as one of them exists."""
    address: int = tensor.untyped_storage()._cdata  # noqa: SLF001
    return address


class PendingCopies:
    """The copies that were noted, in their order, and the memory that they fill."""

    def __init__(self) -> None:
        self._copies: list[ElementCopy] = []
        self._regions: dict[int, _FilledRegions] = {}
        self.nbytes = 0

    def __bool__(self) -> bool:
        return bool(self._copies)

    def fills(self, storage: int) -> bool:
        """Return whether a copy fills a part of a storage."""
        return storage in self._regions

    def add(self, copy: ElementCopy) -> bool:
        """Add a copy, and return ``True``; do nothing if it may fill memory that another one fills."""
        if not self._regions.setdefault(copy.storage, _FilledRegions()).add(copy.target):
            return False
        self._copies.append(copy)
        self.nbytes += copy.view.nbytes
        return True

    def take(self) -> list[ElementCopy]:
        """Return all copies, and forget them."""
        copies, self._copies, self._regions, self.nbytes = self._copies, [], {}, 0
        return copies


class _FilledRegions:
    """The parts of one storage that copies fill: apart from each other, or, as columns of a matrix, interleaved."""

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


def _overlapping(span: ElementRange, parts: Iterable[tuple[ElementRange, torch.Tensor]]) -> list[torch.Tensor]:
    return [part for other, part in parts if other.start < span.stop and span.start < other.stop]


def _span(target: torch.Tensor) -> ElementRange:
    """Return the bytes of the storage from the first element of a tensor to its last one."""
    width, start = target.element_size(), int(target.storage_offset())
    reach = sum((size - 1) * stride for size, stride in zip(target.shape, target.stride(), strict=True))
    return ElementRange(start * width, (start + reach + 1) * width if target.numel() else start * width)


def _are_disjoint(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors of one storage are boxes of the same grid that have no element in common."""
    grid = sorted({stride for tensor in (first, second) for stride in _grid_strides(tensor)}, reverse=True)
    if first.dtype != second.dtype or any(larger % smaller for larger, smaller in itertools.pairwise(grid)):
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
