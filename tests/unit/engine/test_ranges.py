"""Tests byte ranges and boxes of a tensor in row-major order against torch's own order of indices."""

from __future__ import annotations

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from rankless.engine.plan.element_ranges import ElementRange, IndexBox, boxes_of_range, merge_ranges
from tests.helpers.examples import examples
from tests.helpers.tensors import index_tensor


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(st.lists(st.integers(1, 6), max_size=5).map(tuple))
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@given(ranges())
@settings(max_examples=examples(200))
def test_boxes_are_the_elements_of_a_run_in_their_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    actual = list(boxes_of_range(shape, start, stop))
    parts = [
        index_tensor(shape)[tuple(slice(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))]
        for box in actual
    ]
    assert [index for part in parts for index in part.flatten().tolist()] == list(range(start, stop))
    assert len(actual) <= max(1, 2 * len(shape) - 1)


def test_an_empty_run_has_no_boxes_even_in_an_empty_tensor() -> None:
    assert list(boxes_of_range((3, 0, 2), 0, 0)) == []
    assert list(boxes_of_range((3, 2), 4, 4)) == []
    assert list(boxes_of_range((), 0, 1)) == [IndexBox((), ())]


def test_boxes_of_a_tensor_of_terabytes_cost_nothing() -> None:
    assert len(list(boxes_of_range((2**20, 2**10, 2**10), 5, 2**40 - 5))) == 5


@given(st.lists(st.integers(0, 40), max_size=10).map(sorted), st.data())
def test_merged_runs_are_the_same_bytes_with_gaps_between_them(edges: list[int], drawn: st.DataObject) -> None:
    runs = [ElementRange(low, high) for low, high in itertools.pairwise(edges) if drawn.draw(st.booleans())]
    actual = list(merge_ranges(runs))
    assert [byte for run in actual for byte in range(*run)] == [byte for run in runs for byte in range(*run)]
    assert all(low < high for low, high in itertools.pairwise(edge for run in actual for edge in run))
