"""Which elements a rank holds, against torch: its own chunking of a tensor of indices."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from holdfast.engine.runs import Layout, Placement, Run, boxes, local_runs

shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> Layout:
    """Up to three mesh dimensions over ranks in any order, each replicating or sharding any dimension in any way."""
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    ranks = draw(st.permutations(range(3, 3 + math.prod(mesh))))
    sharded = st.builds(Placement, st.integers(0, len(shape) - 1), st.integers(1, 4)) if shape else st.nothing()
    placements = draw(st.lists(st.builds(Placement) | sharded, min_size=len(mesh), max_size=len(mesh)))
    return Layout(mesh, tuple(ranks), tuple(placements))


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[tuple[int, ...], Layout]:
    shape = draw(shapes)
    return shape, draw(layouts(shape))


def torch_placement(placement: Placement) -> Replicate | Shard | _StridedShard:
    if placement.dim is None:
        return Replicate()
    return Shard(placement.dim) if placement.split == 1 else _StridedShard(placement.dim, split_factor=placement.split)


def coordinate_of(layout: Layout, rank: int) -> list[int]:
    grid = torch.tensor(layout.ranks).view(layout.mesh)
    return (grid == rank).nonzero()[0].tolist()


def local_part(tensor: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """What torch gives the rank of a tensor, one mesh dimension after the other."""
    for size, placement, at in zip(layout.mesh, layout.placements, coordinate_of(layout, rank), strict=True):
        if placement.dim is not None:
            parts, _ = torch_placement(placement)._split_tensor(tensor, size, with_padding=False)
            tensor = parts[at]
    return tensor


def indices(runs: tuple[Run, ...]) -> list[int]:
    return [index for start, stop in runs for index in range(start, stop)]


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape)).view(shape)


@given(laid_out())
@settings(max_examples=200)
def test_a_rank_holds_the_elements_that_torch_gives_it(case: tuple[tuple[int, ...], Layout]) -> None:
    shape, layout = case
    for rank in layout.ranks:
        runs = local_runs(shape, layout, rank)
        assert indices(runs) == local_part(numbered(shape), layout, rank).flatten().tolist()


@given(laid_out())
def test_runs_are_ascending_apart_from_each_other_and_not_empty(case: tuple[tuple[int, ...], Layout]) -> None:
    shape, layout = case
    for rank in layout.ranks:
        edges = [edge for run in local_runs(shape, layout, rank) for edge in run]
        assert all(low < high for low, high in itertools.pairwise(edges))


@given(laid_out())
@settings(max_examples=60)
def test_shape_and_offset_agree_with_those_that_torch_computes(case: tuple[tuple[int, ...], Layout]) -> None:
    shape, layout = case
    for rank in layout.ranks:
        local, offset = _compute_local_shape_and_global_offset(
            shape,
            layout.mesh,
            coordinate_of(layout, rank),
            [torch_placement(placement) for placement in layout.placements],
        )
        found = indices(local_runs(shape, layout, rank))
        assert len(found) == math.prod(local)
        if found:
            assert found[0] == sum(at * stride for at, stride in zip(offset, numbered(shape).stride(), strict=True))


@given(laid_out())
def test_all_ranks_together_hold_every_element_and_holders_hold_the_same(case: tuple[tuple[int, ...], Layout]) -> None:
    shape, layout = case
    held = {rank: local_runs(shape, layout, rank) for rank in layout.ranks}
    assert {index for runs in held.values() for index in indices(runs)} == set(range(math.prod(shape)))
    for rank in layout.ranks:
        holders = layout.holders(rank)
        assert rank in holders
        assert list(holders) == sorted(holders)
        assert all(held[other] == held[rank] for other in holders)
    groups = {layout.holders(rank) for rank in layout.ranks}
    assert sorted(itertools.chain(*groups)) == sorted(layout.ranks)


@given(laid_out())
def test_parts_that_are_not_replicas_share_no_element(case: tuple[tuple[int, ...], Layout]) -> None:
    shape, layout = case
    once = [indices(local_runs(shape, layout, holders[0])) for holders in {layout.holders(r) for r in layout.ranks}]
    assert sorted(itertools.chain(*once)) == list(range(math.prod(shape)))


def test_a_rank_outside_of_the_mesh_holds_nothing() -> None:
    layout = Layout((2,), (4, 7), (Placement(0),))
    assert layout.coordinate(5) is None
    assert layout.holders(5) == ()
    assert local_runs((8,), layout, 5) == ()


def test_ranks_are_placed_in_the_mesh_row_by_row() -> None:
    layout = Layout((2, 3), (10, 11, 12, 20, 21, 22), (Placement(), Placement(0)))
    assert layout.coordinate(21) == (1, 1)
    assert layout.holders(21) == (11, 21)


def test_sharding_the_first_dimension_gives_one_run_and_a_later_one_a_run_for_each_row() -> None:
    ranks = (0, 1)
    assert local_runs((4, 6), Layout((2,), ranks, (Placement(0),)), 1) == (Run(12, 24),)
    assert local_runs((4, 6), Layout((2,), ranks, (Placement(1),)), 1) == tuple(
        Run(6 * row + 3, 6 * row + 6) for row in range(4)
    )


def test_fsdp_over_tensor_parallel_columns_gives_one_run() -> None:
    """As FSDP2 lays out what tensor parallelism has sharded first: a strided shard, and its shard."""
    layout = Layout((2, 2), (0, 1, 2, 3), (Placement(0, 2), Placement(0)))
    assert [local_runs((8, 8), layout, rank) for rank in range(4)] == [
        (Run(0, 16),),
        (Run(32, 48),),
        (Run(16, 32),),
        (Run(48, 64),),
    ]


def test_a_scalar_is_one_run_of_one_element() -> None:
    assert local_runs((), Layout((2,), (0, 1), (Placement(),)), 1) == (Run(0, 1),)


def test_a_run_of_a_tensor_of_terabytes_costs_nothing() -> None:
    shape = (2**20, 2**10, 2**10)
    assert local_runs(shape, Layout((4,), (0, 1, 2, 3), (Placement(0),)), 3) == (Run(3 * 2**38, 2**40),)
    assert len(list(boxes(shape, 5, 2**40 - 5))) == 5


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(st.lists(st.integers(1, 6), max_size=5).map(tuple))
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@given(ranges())
@settings(max_examples=200)
def test_boxes_are_the_elements_of_a_run_in_their_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    found = list(boxes(shape, start, stop))
    parts = [
        numbered(shape)[tuple(slice(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))]
        for box in found
    ]
    assert [index for part in parts for index in part.flatten().tolist()] == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_an_empty_run_has_no_boxes_even_in_an_empty_tensor() -> None:
    assert list(boxes((3, 0, 2), 0, 0)) == []
    assert list(boxes((3, 2), 4, 4)) == []
    assert [tuple(box) for box in boxes((), 0, 1)] == [((), ())]
