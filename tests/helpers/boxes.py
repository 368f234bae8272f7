"""Boxes of a tensor, divided at random."""

from __future__ import annotations

from hypothesis import strategies as st

from rankless.engine.plan.element_ranges import IndexBox


def split_box(draw: st.DrawFn, box: IndexBox) -> list[IndexBox]:
    """A box, cut a few times along some dimension."""
    axes = [axis for axis, size in enumerate(box.shape) if size > 1]
    if not axes or draw(st.booleans()):
        return [box]
    axis = draw(st.sampled_from(axes))
    at = draw(st.integers(1, box.shape[axis] - 1))
    low = IndexBox(box.offset, replace_item(box.shape, axis, at))
    high = IndexBox(
        replace_item(box.offset, axis, box.offset[axis] + at), replace_item(box.shape, axis, box.shape[axis] - at)
    )
    return split_box(draw, low) + split_box(draw, high)


def replace_item(row: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*row[:at], value, *row[at + 1 :])


def box_slices(box: IndexBox) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(*box, strict=True))
