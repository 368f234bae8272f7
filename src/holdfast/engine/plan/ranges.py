"""Runs: contiguous ranges of a tensor in row-major order, and the boxes of indices that they are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class ElementRange(NamedTuple):
    """A contiguous range ``[start, stop)``."""

    start: int
    stop: int


class IndexBox(NamedTuple):
    """A rectangular part of a tensor: its first index and its extent in each dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


def merge_ranges(runs: Iterable[ElementRange]) -> Iterator[ElementRange]:
    """Neighbouring runs as one; empty ones left out."""
    current: ElementRange | None = None
    for run in runs:
        if run.start == run.stop:
            continue
        if current is not None and current.stop == run.start:
            current = ElementRange(current.start, run.stop)
            continue
        if current is not None:
            yield current
        current = run
    if current is not None:
        yield current


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[IndexBox]:
    """The boxes that make up elements ``[start, stop)`` of a tensor of ``shape``, in row-major order.

    At most two for each dimension but the last; the way back from a run to indices of a tensor.
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
