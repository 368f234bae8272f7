"""Contiguous ranges of a tensor in row-major order, and the boxes of indices that make up a range.

All of ``engine/``, the readers in ``formats/`` and the components use these types. Row-major order is the order of the
bytes in the files of a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class ElementRange(NamedTuple):
    """A contiguous range ``[start, stop)`` of elements or bytes."""

    start: int
    stop: int


class TensorRange(NamedTuple):
    """Elements or bytes ``[start, stop)`` of the tensor with number ``tensor``."""

    tensor: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of elements or bytes."""
        return self.stop - self.start


class IndexBox(NamedTuple):
    """A rectangular part of a tensor: its first index and its extent in each dimension.

    For example, rows 4 to 7 of a matrix with 8 columns are ``IndexBox((4, 0), (4, 8))``.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]


def merge_ranges(ranges: Iterable[ElementRange]) -> Iterator[ElementRange]:
    """Merge adjacent ranges, and drop empty ones.

    For example, ``[0, 4)``, ``[4, 6)`` and ``[8, 9)`` become ``[0, 6)`` and ``[8, 9)``.
    """
    current: ElementRange | None = None
    for current_range in ranges:
        if current_range.start == current_range.stop:
            continue
        if current is not None and current.stop == current_range.start:
            current = ElementRange(current.start, current_range.stop)
            continue
        if current is not None:
            yield current
        current = current_range
    if current is not None:
        yield current


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[IndexBox]:
    """Yield the boxes that make up elements ``[start, stop)`` of a tensor of ``shape``, in row-major order.

    There are at most two boxes for each dimension except the last. For example, elements ``[2, 8)`` of a tensor of
    shape ``(3, 4)`` are the end of row 0, ``IndexBox((0, 2), (1, 2))``, and row 1, ``IndexBox((1, 0), (1, 4))``.
    """
    if start >= stop:
        return
    if not shape:
        yield IndexBox((), ())
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
        yield IndexBox((first, *(0 for _ in shape[1:])), (full - first, *shape[1:]))
    if stop % inner:
        yield from _in_row(shape, full, 0, stop - full * inner)


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[IndexBox]:
    for box in boxes_of_range(shape[1:], start, stop):
        yield IndexBox((row, *box.offset), (1, *box.shape))
