"""Tests the byte ranges and the boxes of views of stored tensors against torch, which follows the same views itself."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from rankless.inference.strided_view import Dimension, StridedView, describe_view, join_spans


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """A view of a tensor whose elements are their own positions."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    tensor = torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)
    for _ in range(draw(st.integers(0, 4))):
        axis = draw(st.integers(0, tensor.ndim - 1)) if tensor.ndim else 0
        kind = draw(st.sampled_from(["narrow", "step", "permute", "select", "unsqueeze"]))
        if kind == "unsqueeze":
            tensor = tensor.unsqueeze(axis)
        elif tensor.ndim and kind == "narrow":
            start = draw(st.integers(0, tensor.shape[axis]))
            tensor = tensor.narrow(axis, start, draw(st.integers(0, tensor.shape[axis] - start)))
        elif tensor.ndim and kind == "step":
            index = [slice(None)] * tensor.ndim
            index[axis] = slice(None, None, draw(st.integers(1, 3)))
            tensor = tensor[tuple(index)]
        elif tensor.ndim and kind == "permute":
            tensor = tensor.permute(draw(st.permutations(range(tensor.ndim))))
        elif tensor.ndim and kind == "select" and tensor.shape[axis]:
            tensor = tensor.select(axis, draw(st.integers(0, tensor.shape[axis] - 1)))
    return tensor


def describe(tensor: torch.Tensor) -> tuple[StridedView, tuple[int, ...]]:
    described = describe_view(
        int(tensor.storage_offset()) * 4, 4, tensor.shape, [stride * 4 for stride in tensor.stride()]
    )
    assert described is not None
    return described


@given(views(), st.integers(0, 40))
def test_spans_have_all_elements_and_no_long_gap(tensor: torch.Tensor, gap: int) -> None:
    view, _ = describe(tensor)
    needed = sorted({position * 4 for position in tensor.flatten().tolist()})
    assert view.nbytes == 4 * len(needed)
    spans = list(view.spans(gap))
    inside = [position for start, stop in spans for position in range(start, stop, 4)]
    assert set(needed) <= set(inside)
    assert len(inside) == len(set(inside))
    assert spans == sorted(spans)
    if needed:
        assert (view.offset, view.stop) == (needed[0], needed[-1] + 4)
        others = [position for position in inside if position not in needed]
        runs = [(after - before) - 4 for before, after in itertools.pairwise(needed)]
        assert len(others) * 4 <= sum(run for run in runs if run <= gap)


@given(views(), st.data())
def test_boxes_have_just_the_elements_of_a_range(tensor: torch.Tensor, data: st.DataObject) -> None:
    view, axes = describe(tensor)
    ordered = tensor.permute((*axes, *(axis for axis in range(tensor.ndim) if axis not in axes)))
    start = data.draw(st.integers(0, 70)) * 4
    stop = start + data.draw(st.integers(0, 70)) * 4
    elements: list[int] = []
    for box in view.boxes(start, stop):
        part = ordered[tuple(slice(*indices) for indices in box.indices)]
        assert int(part.flatten()[0]) * 4 == box.offset
        elements += part.flatten().tolist()
    assert sorted(elements) == sorted(p for p in set(tensor.flatten().tolist()) if start <= p * 4 < stop)


def test_rows_cut_by_columns_are_never_enumerated_if_the_gaps_are_read() -> None:
    view = StridedView(0, 2, (Dimension(10**12, 4096), Dimension(512, 2)))
    assert list(view.spans(64 * 2**10)) == [(0, (10**12 - 1) * 4096 + 1024)]


def test_what_as_strided_mixes_is_not_described() -> None:
    assert describe_view(0, 4, (3, 3), (4, 4)) is None
    assert describe_view(0, 4, (3, 3), (12, 8)) is None


def test_spans_of_several_views_are_joined_over_small_gaps() -> None:
    spans = [next(iter(StridedView(at, 1, (Dimension(4, 1),)).spans(0))) for at in (20, 0, 6, 8)]
    assert join_spans(spans, 2) == [(0, 12), (20, 24)]
    assert join_spans(spans, 8) == [(0, 24)]
    assert join_spans([], 8) == []
