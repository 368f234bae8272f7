"""Checks that the chunks of a tensor tile it: every element is in exactly one chunk. Pure functions.

Readers of formats with chunks check with it when they open a checkpoint, before anything is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rankless.engine.plan.element_ranges import ElementRange, IndexBox
from rankless.errors import ReadBudgetError
from rankless.ondisk.read_budget import ReadBudget

#: The units in the budget for the chunks of a whole folder, in addition to those that its metadata earns.
LEAST = 2**22

#: Units of work for a chunk in each dimension of a tensor that has chunks which are not contiguous.
_CHUNK = 4


def contiguous_range(box: IndexBox, shape: tuple[int, ...]) -> ElementRange | None:
    """Return the range of elements of a box in row-major order, or ``None`` if it is not contiguous.

    For example, rows 1 and 2 of a tensor of shape ``(4, 8)`` are elements ``[8, 24)``; its first column is not
    contiguous.
    """
    cut = next((dim for dim, size in enumerate(box.shape) if size != 1), len(shape))
    if any(box.shape[dim] != shape[dim] for dim in range(cut + 1, len(shape))):
        return None
    start = 0
    for at, size in zip(box.offset, shape, strict=True):
        start = start * size + at
    return ElementRange(start, start + math.prod(box.shape))


def check_tiling(boxes: Sequence[IndexBox], shape: tuple[int, ...], budget: ReadBudget) -> None:
    """Raise ``ValueError`` if the boxes leave a gap in the tensor, overlap or reach beyond it.

    No box may be empty. All tensors of a checkpoint share one ``budget``.
    """
    for box in boxes:
        is_inside = len(box.offset) == len(box.shape) == len(shape) and all(
            0 <= start <= start + size <= whole for start, size, whole in zip(*box, shape, strict=True)
        )
        if not is_inside:
            raise ValueError(
                f"its chunk of shape {list(box.shape)} at {list(box.offset)} reaches beyond the shape {list(shape)}"
            )
    ranges = [contiguous_range(box, shape) for box in boxes]
    if all(elements is not None for elements in ranges):
        _check_ranges(sorted(elements for elements in ranges if elements is not None), math.prod(shape))
    else:
        _GridChecker(budget).check_boxes(shape, list(boxes), ())


def _check_ranges(ranges: Sequence[ElementRange], size: int) -> None:
    reached = 0
    for start, stop in [*ranges, ElementRange(size, size)]:
        if start > reached:
            raise ValueError(f"no chunk has its elements {reached} to {start}")
        if start < reached:
            raise ValueError(f"two chunks overlap from its element {start} on")
        reached = stop


class _GridChecker:
    """A recursive check: it cuts the tensor along the edges of its boxes, one dimension after another.

    In each cell of the grid that results there must be exactly one box.
    """

    def __init__(self, budget: ReadBudget) -> None:
        self._budget = budget

    def check_boxes(self, shape: tuple[int, ...], boxes: list[IndexBox], prefix: tuple[int, ...]) -> None:
        """Raise ``ValueError`` if not exactly one box is at each index. ``prefix``: the indices of outer dimensions."""
        if not shape:
            if len(boxes) > 1:
                raise ValueError(f"two chunks overlap at its element {list(prefix)}")
            return
        for start, inside in self._split_first_dim(shape[0], boxes):
            if not inside:
                raise ValueError(f"no chunk has its element {[*prefix, start, *(0 for _ in shape[1:])]}")
            self.check_boxes(shape[1:], [IndexBox(box.offset[1:], box.shape[1:]) for box in inside], (*prefix, start))

    def _split_first_dim(self, size: int, boxes: list[IndexBox]) -> Iterator[tuple[int, list[IndexBox]]]:
        """Yield ranges of the first dimension, each by its start, with the boxes that span it."""
        self._spend_units(_CHUNK * len(boxes))
        rows: dict[ElementRange, list[IndexBox]] = {}
        for box in boxes:
            rows.setdefault(ElementRange(box.offset[0], box.offset[0] + box.shape[0]), []).append(box)
        ordered = sorted(rows)
        if [0, *(row.stop for row in ordered)] == [*(row.start for row in ordered), size]:
            yield from ((row.start, rows[row]) for row in ordered)  # the boxes form a grid: the usual case
            return
        for start in sorted({0, *(edge for row in ordered for edge in row)} - {size}):
            self._spend_units(len(boxes))
            yield start, [box for box in boxes if box.offset[0] <= start < box.offset[0] + box.shape[0]]

    def _spend_units(self, units: int) -> None:
        try:
            self._budget.spend(units)
        except ReadBudgetError as error:
            raise ValueError("its chunks are too many and too irregular to check") from error
