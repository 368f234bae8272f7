"""The elements of a stored tensor that a view of it has, as byte ranges of the stored tensor. Pure.

A view is described by the distance of the elements in each of its dimensions. The elements are never listed: one rank
of a large model has 50 million runs of bytes.

The other modules of this package describe copies with it, on each rank, and send it to other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rankless.engine.plan.element_ranges import ElementRange, merge_ranges


class Dimension(NamedTuple):
    """A dimension of a view: its size, and the bytes from one index to the next."""

    size: int
    stride: int


class StridedView(NamedTuple):
    """Elements of a stored tensor, in bytes from its start.

    ``dimensions`` are sorted by falling stride, and each index of a dimension has all of its elements before the
    elements of the next index. See :func:`describe_view`. For example, the second column of a float32 matrix of shape
    (3, 4) begins at byte 4, and has one dimension of size 3 and stride 16.
    """

    offset: int
    itemsize: int
    dimensions: tuple[Dimension, ...]

    @property
    def nbytes(self) -> int:
        """The size of the elements in bytes."""
        return self.itemsize * math.prod(dimension.size for dimension in self.dimensions)

    @property
    def stop(self) -> int:
        """The byte after the last element."""
        return self.offset + _extent(self.dimensions, self.itemsize)

    @property
    def is_contiguous(self) -> bool:
        """True if no other bytes are between the elements."""
        return self.stop - self.offset == self.nbytes

    def spans(self, gap: int) -> Iterator[ElementRange]:
        """Yield the ranges of bytes that contain all elements, and at most ``gap`` other bytes in a row."""
        if not self.nbytes:
            return
        run, outer = self.itemsize, list(self.dimensions)
        while outer and outer[-1].stride - run <= gap:
            dimension = outer.pop()
            run += (dimension.size - 1) * dimension.stride
        for start in _starts(self.offset, outer):
            yield ElementRange(start, start + run)

    def boxes(self, start: int, stop: int) -> Iterator[Box]:
        """Yield boxes of indices that together have the elements in bytes ``[start, stop)``.

        Both are between elements. There are at most two boxes for each dimension except the last.
        """
        yield from _boxes(self.offset, self.dimensions, self.itemsize, ElementRange(start, stop))


class Box(NamedTuple):
    """A range of indices in each dimension of a view, and the byte of the stored tensor where the first one is."""

    offset: int
    indices: tuple[ElementRange, ...]


def describe_view(
    offset: int, itemsize: int, shape: Sequence[int], strides: Sequence[int]
) -> tuple[StridedView, tuple[int, ...]] | None:
    """Describe a view that has its first element at byte ``offset``; ``strides`` are in bytes.

    Return it with its dimensions in the order of ``shape``: dimensions that are left out have one element, or the same
    elements at each index. Return ``None`` if elements of several indices are mixed, as only ``as_strided`` can do.
    """
    order = sorted((axis for axis, size in enumerate(shape) if size != 1 and strides[axis]), key=lambda i: -strides[i])
    dimensions = tuple(Dimension(shape[axis], strides[axis]) for axis in order)
    if 0 in shape:
        return StridedView(offset, itemsize, (Dimension(0, itemsize),)), ()
    for number, dimension in enumerate(dimensions):
        if _extent(dimensions[number + 1 :], itemsize) > dimension.stride:
            return None
    return StridedView(offset, itemsize, dimensions), tuple(order)


def join_spans(spans: Iterator[ElementRange] | Sequence[ElementRange], gap: int) -> list[ElementRange]:
    """Return ranges in ascending order that contain all spans, joined over at most ``gap`` bytes between them.

    For example, bytes 0 to 10 and 12 to 20 become one range with a gap of 2.
    """
    joined: list[ElementRange] = []
    for span in merge_ranges(sorted(spans)):
        if joined and span.start - joined[-1].stop <= gap:
            joined[-1] = ElementRange(joined[-1].start, max(joined[-1].stop, span.stop))
        else:
            joined.append(span)
    return joined


def _extent(dimensions: Sequence[Dimension], itemsize: int) -> int:
    """Return the bytes from the first element to the end of the last one; 0 if there are none."""
    if any(not dimension.size for dimension in dimensions):
        return 0
    return itemsize + sum((dimension.size - 1) * dimension.stride for dimension in dimensions)


def _starts(offset: int, dimensions: Sequence[Dimension]) -> Iterator[int]:
    """Yield the position of each index of the dimensions, in ascending order."""
    if not dimensions:
        yield offset
        return
    first, *others = dimensions
    for index in range(first.size):
        yield from _starts(offset + index * first.stride, others)


def _boxes(offset: int, dimensions: Sequence[Dimension], itemsize: int, span: ElementRange) -> Iterator[Box]:
    if not dimensions:
        if span.start <= offset < span.stop:
            yield Box(offset, ())
        return
    (size, stride), inner = dimensions[0], dimensions[1:]
    extent = _extent(inner, itemsize)
    # The indices that have all their elements inside the span.
    first = min(max(-((offset - span.start) // stride), 0), size)
    last = min(max((span.stop - extent - offset) // stride + 1, first), size)
    before, after = first - 1, last
    if before >= 0 and offset + before * stride + extent > span.start:
        yield from _boxes_at(before, offset, dimensions, itemsize, span)
    if first < last:
        whole = tuple(ElementRange(0, dimension.size) for dimension in inner)
        yield Box(offset + first * stride, (ElementRange(first, last), *whole))
    if after < size and offset + after * stride < span.stop:
        yield from _boxes_at(after, offset, dimensions, itemsize, span)


def _boxes_at(
    index: int, offset: int, dimensions: Sequence[Dimension], itemsize: int, span: ElementRange
) -> Iterator[Box]:
    """Yield the boxes of one index of the first dimension."""
    for box in _boxes(offset + index * dimensions[0].stride, dimensions[1:], itemsize, span):
        yield Box(box.offset, (ElementRange(index, index + 1), *box.indices))
