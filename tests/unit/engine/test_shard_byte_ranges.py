"""Tests the byte ranges that a rank holds against torch's own chunking of a tensor of indices."""

from __future__ import annotations

import bisect
import itertools
import math

import pytest
from hypothesis import given, settings
from torch.distributed.tensor import _utils

from rankless.engine.plan.element_ranges import ElementRange
from rankless.engine.plan.layout_types import (
    FlatSharded,
    MeshShape,
    PlacementLayout,
    Replicated,
    Sharded,
    coordinate_of_rank,
    ranks_by_coordinate,
)
from rankless.engine.plan.shard_byte_ranges import LocalShard, local_shard
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.dtypes import WIDTHS, dtype_width
from tests.helpers.examples import examples
from tests.helpers.placements import mesh_coordinate, tensor_layouts, torch_placement, torch_shard
from tests.helpers.tensors import index_tensor


def held(info: TensorInfo, layout: PlacementLayout, rank: int) -> LocalShard:
    coordinate = coordinate_of_rank(layout, rank)
    assert coordinate is not None
    return local_shard(info, layout.division, coordinate)


def bytes_in(mine: LocalShard) -> list[int]:
    return [byte for run in mine.iter_ranges() for byte in range(*run)]


def bytes_by_torch(info: TensorInfo, layout: PlacementLayout, rank: int) -> list[int]:
    size = dtype_width(info.dtype)
    elements = torch_shard(index_tensor(info.shape), layout, rank).flatten().tolist()
    return [element * size + byte for element in elements for byte in range(size)]


@given(tensor_layouts())
@settings(max_examples=examples(150))
def test_a_rank_holds_the_bytes_that_torch_gives_it(case: tuple[TensorInfo, PlacementLayout]) -> None:
    info, layout = case
    for rank in layout.mesh.ranks:
        mine = held(info, layout, rank)
        expected = bytes_by_torch(info, layout, rank)
        assert bytes_in(mine) == expected
        assert mine.nbytes == len(expected)


@pytest.mark.parametrize("dtype", WIDTHS)
def test_every_dtype_is_measured_in_bytes(dtype: str) -> None:
    layout = PlacementLayout(MeshShape((2,), (0, 1)), (Sharded(1),))
    expected = tuple(ElementRange(start * WIDTHS[dtype], (start + 3) * WIDTHS[dtype]) for start in (3, 9))
    assert tuple(held(TensorInfo(dtype, (2, 6)), layout, 1).iter_ranges()) == expected


@given(tensor_layouts())
def test_runs_are_ascending_apart_from_each_other_and_not_empty(case: tuple[TensorInfo, PlacementLayout]) -> None:
    info, layout = case
    for rank in layout.mesh.ranks:
        edges = [edge for run in held(info, layout, rank).iter_ranges() for edge in run]
        assert all(low < high for low, high in itertools.pairwise(edges))


@pytest.mark.skipif(
    not hasattr(_utils, "_compute_local_shape_and_global_offset"), reason="torch computes it for real meshes only"
)
@given(tensor_layouts())
@settings(max_examples=examples(60))
def test_shape_and_offset_agree_with_those_that_torch_computes(case: tuple[TensorInfo, PlacementLayout]) -> None:
    info, layout = case
    if any(isinstance(placement, FlatSharded) for placement in layout.placements):
        return
    for rank in layout.mesh.ranks:
        local, offset = _utils._compute_local_shape_and_global_offset(
            info.shape,
            layout.mesh.shape,
            mesh_coordinate(layout.mesh, rank),
            [torch_placement(placement) for placement in layout.placements],
        )
        actual = bytes_in(held(info, layout, rank))
        size = dtype_width(info.dtype)
        assert len(actual) == math.prod(local) * size
        if actual:
            strides = index_tensor(info.shape).stride()
            assert actual[0] == sum(at * stride for at, stride in zip(offset, strides, strict=True)) * size


@given(tensor_layouts())
def test_every_rank_of_the_mesh_holds_one_part_and_holders_hold_the_same(
    case: tuple[TensorInfo, PlacementLayout],
) -> None:
    info, layout = case
    actual = ranks_by_coordinate(layout)
    assert sorted(itertools.chain(*actual.values())) == sorted(layout.mesh.ranks)
    for coordinate, ranks in actual.items():
        assert list(ranks) == sorted(ranks)
        assert all(coordinate_of_rank(layout, rank) == coordinate for rank in ranks)
        assert len({tuple(bytes_by_torch(info, layout, rank)) for rank in ranks}) == 1


@given(tensor_layouts())
def test_all_parts_together_are_every_byte_once(case: tuple[TensorInfo, PlacementLayout]) -> None:
    info, layout = case
    places = list(itertools.product(*(range(parts) for parts, _ in layout.division)))
    assert sorted(ranks_by_coordinate(layout)) == places
    every = [bytes_in(local_shard(info, layout.division, place)) for place in places]
    assert sorted(itertools.chain(*every)) == list(range(info.nbytes))


@given(tensor_layouts())
def test_parts_of_one_division_are_measured_on_the_same_axes(case: tuple[TensorInfo, PlacementLayout]) -> None:
    info, layout = case
    (axes,) = {held(info, layout, rank).shape for rank in layout.mesh.ranks}
    assert math.prod(axes) == info.nbytes


@given(tensor_layouts())
def test_before_a_byte_lie_those_of_the_part_that_are_less(case: tuple[TensorInfo, PlacementLayout]) -> None:
    info, layout = case
    for rank in layout.mesh.ranks[:3]:
        mine = held(info, layout, rank)
        actual = bytes_in(mine)
        step = max(1, info.nbytes // 200)
        for position in {*range(0, info.nbytes, step), info.nbytes}:
            assert mine.bytes_before(position) == bisect.bisect_left(actual, position)


@given(tensor_layouts())
def test_run_length_is_the_mean_and_at_most_that_where_runs_of_strided_shards_meet(
    case: tuple[TensorInfo, PlacementLayout],
) -> None:
    info, layout = case
    strided = any(isinstance(placement, Sharded) and placement.split > 1 for placement in layout.placements)
    for rank in layout.mesh.ranks:
        mine = held(info, layout, rank)
        runs = list(mine.iter_ranges())
        mean = mine.nbytes // len(runs) if runs else 0
        assert mine.mean_range_bytes == mean or (strided and 0 < mine.mean_range_bytes < mean)


def test_strided_shards_that_meet_over_rows_count_as_two_runs() -> None:
    """Why ``run_length`` is "about": the end of a row and the start of the next are neighbours."""
    both_ends = LocalShard((3, 8), ((ElementRange(0, 3),), (ElementRange(0, 2), ElementRange(6, 8))))
    assert list(both_ends.iter_ranges()) == [
        ElementRange(0, 2),
        ElementRange(6, 10),
        ElementRange(14, 18),
        ElementRange(22, 24),
    ]
    assert both_ends.mean_range_bytes == 2


def test_what_replicates_or_has_one_rank_does_not_divide_but_flat_does() -> None:
    mesh = MeshShape((2, 1, 3), tuple(range(6)))
    assert PlacementLayout(mesh, (Replicated(), Sharded(0), Sharded(1))).division == ((3, Sharded(1)),)
    assert PlacementLayout(mesh, (Replicated(), FlatSharded(4, 8), Replicated())).division == ((1, FlatSharded(4, 8)),)
    assert PlacementLayout(mesh, (Replicated(), Sharded(0), Replicated())).division == ()


@pytest.mark.parametrize("dims", [dims for n in range(1, 5) for dims in itertools.permutations(range(4), n)], ids=str)
def test_any_dimensions_are_cut_in_any_order(dims: tuple[int, ...]) -> None:
    ranks = MeshShape((2,) * len(dims), tuple(range(2 ** len(dims))))
    info, layout = TensorInfo("BF16", (3, 2, 5, 4)), PlacementLayout(ranks, tuple(map(Sharded, dims)))
    for rank in ranks.ranks:
        assert bytes_in(held(info, layout, rank)) == bytes_by_torch(info, layout, rank)


def test_a_rank_outside_of_the_mesh_holds_nothing() -> None:
    layout = PlacementLayout(MeshShape((2,), (4, 7)), (Sharded(0),))
    assert coordinate_of_rank(layout, 5) is None
    assert ranks_by_coordinate(layout) == {(0,): (4,), (1,): (7,)}


def test_ranks_are_placed_in_the_mesh_row_by_row() -> None:
    layout = PlacementLayout(MeshShape((2, 3), (10, 11, 12, 20, 21, 22)), (Replicated(), Sharded(0)))
    assert coordinate_of_rank(layout, 21) == (1,)
    assert ranks_by_coordinate(layout) == {(0,): (10, 20), (1,): (11, 21), (2,): (12, 22)}


def test_sharding_the_first_dimension_gives_one_run_and_a_later_one_a_run_for_each_row() -> None:
    info, mesh = TensorInfo("U8", (4, 6)), MeshShape((2,), (0, 1))
    assert list(held(info, PlacementLayout(mesh, (Sharded(0),)), 1).iter_ranges()) == [ElementRange(12, 24)]
    assert list(held(info, PlacementLayout(mesh, (Sharded(1),)), 1).iter_ranges()) == [
        ElementRange(6 * row + 3, 6 * row + 6) for row in range(4)
    ]


def test_fsdp_over_tensor_parallel_columns_gives_one_run() -> None:
    """As FSDP2 lays out what tensor parallelism has sharded first: a strided shard, and its shard."""
    layout = PlacementLayout(MeshShape((2, 2), (0, 1, 2, 3)), (Sharded(0, 2), Sharded(0)))
    assert [list(held(TensorInfo("U8", (8, 8)), layout, rank).iter_ranges()) for rank in range(4)] == [
        [ElementRange(0, 16)],
        [ElementRange(32, 48)],
        [ElementRange(16, 32)],
        [ElementRange(48, 64)],
    ]


def test_a_flat_shard_holds_what_of_the_tensor_lies_in_it() -> None:
    """A tensor of 8 elements at element 5 of a flat parameter that is cut every 4."""
    layout = PlacementLayout(MeshShape((2, 4), tuple(range(8))), (Replicated(), FlatSharded(5, 4)))
    expected = [[], [ElementRange(0, 6)], [ElementRange(6, 14)], [ElementRange(14, 16)]]
    assert [list(held(TensorInfo("BF16", (2, 4)), layout, rank).iter_ranges()) for rank in range(8)] == 2 * expected


def test_a_scalar_is_one_run_of_one_element() -> None:
    layout = PlacementLayout(MeshShape((2,), (0, 1)), (Replicated(),))
    assert list(held(TensorInfo("F32", ()), layout, 1).iter_ranges()) == [ElementRange(0, 4)]


def test_a_part_of_a_tensor_of_terabytes_costs_nothing() -> None:
    info, mesh = TensorInfo("F32", (2**20, 2**10, 2**10)), MeshShape((4,), (0, 1, 2, 3))
    rows = held(info, PlacementLayout(mesh, (Sharded(0),)), 3)
    assert list(rows.iter_ranges()) == [ElementRange(3 * 2**40, 2**42)]
    columns = held(info, PlacementLayout(mesh, (Sharded(2),)), 3)
    assert columns.nbytes == 2**40
    assert columns.mean_range_bytes == 2**10
    assert columns.bytes_before(2**42) == 2**40
    assert columns.bytes_before(2**41 + 3 * 2**10 + 5) == 2**39 + 5
