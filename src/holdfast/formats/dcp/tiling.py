"""Whether the chunks of a tensor are all of it, and each element once. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from holdfast.engine.plan.ranges import ElementRange, IndexBox
from holdfast.errors import ReadBudgetError
from holdfast.ondisk.read_budget import ReadBudget

#: Steps that there are for the chunks of a whole folder, beside those that its metadata earns.
LEAST = 2**22

#: Steps for a chunk in each dimension of a tensor whose chunks are no rows.
_CHUNK = 4


def contiguous_range(box: IndexBox, shape: tuple[int, ...]) -> ElementRange | None:
    """The run of elements that a box is in row-major order; ``None`` where it is several."""
    cut = next((dim for dim, size in enumerate(box.shape) if size != 1), len(shape))
    if any(box.shape[dim] != shape[dim] for dim in range(cut + 1, len(shape))):
        return None
    start = 0
    for at, size in zip(box.offset, shape, strict=True):
        start = start * size + at
    return ElementRange(start, start + math.prod(box.shape))


def check_tiling(boxes: Sequence[IndexBox], shape: tuple[int, ...], budget: ReadBudget) -> None:
    """Raise ``ValueError`` where boxes of a tensor leave a gap, overlap or reach beyond it. No box is empty.

    ``budget`` is one for all tensors of a checkpoint.
    """
    for box in boxes:
        inside = len(box.offset) == len(box.shape) == len(shape) and all(
            0 <= start <= start + size <= whole for start, size, whole in zip(*box, shape, strict=True)
        )
        if not inside:
            raise ValueError(f"a chunk of shape {list(box.shape)} at {list(box.offset)} reaches beyond it")
    runs = [contiguous_range(box, shape) for box in boxes]
    if all(run is not None for run in runs):
        _check_runs(sorted(run for run in runs if run is not None), math.prod(shape))
    else:
        _Cells(budget).check(shape, list(boxes), ())


def _check_runs(runs: Sequence[ElementRange], size: int) -> None:
    reached = 0
    for start, stop in [*runs, ElementRange(size, size)]:
        if start > reached:
            raise ValueError(f"there is nothing of its elements {reached} to {start}")
        if start < reached:
            raise ValueError(f"two chunks have its elements from {start} on")
        reached = stop


class _Cells:
    """Cuts a tensor along the edges of its boxes, dimension by dimension, until there is one in each cell."""

    def __init__(self, budget: ReadBudget) -> None:
        self._budget = budget

    def check(self, shape: tuple[int, ...], boxes: list[IndexBox], place: tuple[int, ...]) -> None:
        """Raise ``ValueError`` where not exactly one box is at each index. ``place`` are the indices before these."""
        if not shape:
            if len(boxes) > 1:
                raise ValueError(f"two chunks have its element at {list(place)}")
            return
        for start, here in self._slabs(shape[0], boxes):
            if not here:
                raise ValueError(f"there is nothing of it at {[*place, start, *(0 for _ in shape[1:])]}")
            self.check(shape[1:], [IndexBox(box.offset[1:], box.shape[1:]) for box in here], (*place, start))

    def _slabs(self, size: int, boxes: list[IndexBox]) -> Iterator[tuple[int, list[IndexBox]]]:
        """Ranges of the first dimension in which the same boxes are, by where they start."""
        self._spend(_CHUNK * len(boxes))
        rows: dict[ElementRange, list[IndexBox]] = {}
        for box in boxes:
            rows.setdefault(ElementRange(box.offset[0], box.offset[0] + box.shape[0]), []).append(box)
        ordered = sorted(rows)
        if [0, *(row.stop for row in ordered)] == [*(row.start for row in ordered), size]:
            yield from ((row.start, rows[row]) for row in ordered)  # as any grid has them
            return
        for start in sorted({0, *(edge for row in ordered for edge in row)} - {size}):
            self._spend(len(boxes))
            yield start, [box for box in boxes if box.offset[0] <= start < box.offset[0] + box.shape[0]]

    def _spend(self, steps: int) -> None:
        try:
            self._budget.spend(steps)
        except ReadBudgetError as error:
            raise ValueError("its chunks are cut in too many ways") from error
