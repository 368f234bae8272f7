"""Tests stripes: short ranges of several ranks, assembled into large ones and split again."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankless.engine.plan import stripes as striping
from rankless.engine.plan.element_ranges import ElementRange
from rankless.engine.plan.layout_types import (
    FlatSharded,
    MeshShape,
    PlacementLayout,
    Replicated,
    Sharded,
    ranks_by_coordinate,
)
from rankless.engine.plan.shard_byte_ranges import LocalShard, local_shard
from rankless.engine.plan.stripes import Bytes, count_stripes, is_narrow, split_into_stripes, stripe_slice
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.dtypes import WIDTHS, dtype_width
from tests.helpers.examples import examples
from tests.helpers.pairwise import each_value
from tests.helpers.placements import tensor_layouts

#: Whole elements of any dtype, as the real one.
sizes = st.sampled_from([8, 16, 24, 64, 256, 4096])


def parts_of(info: TensorInfo, layout: PlacementLayout) -> list[LocalShard]:
    """Every part, once."""
    return [local_shard(info, layout.division, coordinate) for coordinate in ranks_by_coordinate(layout)]


def noise(size: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def memory_of(mine: LocalShard, whole: Bytes) -> Bytes:
    """The part as it lies in its rank's memory."""
    return np.concatenate([whole[:0], *(whole[start:stop] for start, stop in mine.iter_ranges())])


def cuts(mine: LocalShard, memory: Bytes) -> Iterator[tuple[ElementRange, Bytes]]:
    """The stripes that the part has bytes in, and those bytes."""
    for stripe in split_into_stripes(mine.shape):
        start, stop = mine.bytes_before(stripe.start), mine.bytes_before(stripe.stop)
        if start < stop:
            yield stripe, memory[start:stop]


@given(st.lists(st.integers(0, 12), min_size=1, max_size=4).map(tuple), sizes)
@settings(max_examples=examples(200))
def test_stripes_tile_the_tensor_in_order_and_none_is_too_large(shape: tuple[int, ...], size: int) -> None:
    with mock.patch.object(striping, "STRIPE", size):
        actual = list(split_into_stripes(shape))
        assert count_stripes(shape) == len(actual)
    reached = 0
    for start, stop in actual:
        assert start == reached
        assert 0 < stop - start <= size
        reached = stop
    assert reached == math.prod(shape)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4).map(tuple), sizes)
def test_stripes_are_no_crumbs(shape: tuple[int, ...], size: int) -> None:
    """Only where a row ends is one less than half full, and its neighbour is not."""
    with mock.patch.object(striping, "STRIPE", size):
        actual = [stop - start for start, stop in split_into_stripes(shape)]
    assert all(left + other > size / 2 for left, other in itertools.pairwise(actual))


def test_stripes_are_rows_while_a_row_fits_and_pieces_of_rows_where_not() -> None:
    with mock.patch.object(striping, "STRIPE", 64):
        assert list(split_into_stripes((5, 24))) == [ElementRange(0, 48), ElementRange(48, 96), ElementRange(96, 120)]
        assert list(split_into_stripes((2, 100))) == [
            ElementRange(0, 64),
            ElementRange(64, 100),
            ElementRange(100, 164),
            ElementRange(164, 200),
        ]
        assert list(split_into_stripes((2, 3, 32))) == [
            ElementRange(0, 64),
            ElementRange(64, 96),
            ElementRange(96, 160),
            ElementRange(160, 192),
        ]


def test_a_stripe_of_a_tensor_of_terabytes_costs_nothing() -> None:
    assert next(split_into_stripes((2**20, 2**22))) == ElementRange(0, striping.STRIPE)


@given(tensor_layouts(), sizes)
@settings(max_examples=examples(200))
def test_the_shares_of_all_parts_put_together_are_the_stripes(
    case: tuple[TensorInfo, PlacementLayout], size: int
) -> None:
    info, layout = case
    whole = noise(info.nbytes)
    built, filled = noise(info.nbytes, seed=1), 0
    with mock.patch.object(striping, "STRIPE", size):
        for mine in parts_of(info, layout):
            for stripe, data in cuts(mine, memory_of(mine, whole)):
                stripe_slice(mine, stripe).copy_in(data, built[stripe.start : stripe.stop])
                filled += len(data)
    assert built.tobytes() == whole.tobytes()
    assert filled == info.nbytes


@given(tensor_layouts(), sizes)
@settings(max_examples=examples(200))
def test_taking_a_share_out_of_a_stripe_is_the_inverse_of_putting_it_in(
    case: tuple[TensorInfo, PlacementLayout], size: int
) -> None:
    info, layout = case
    whole = noise(info.nbytes)
    with mock.patch.object(striping, "STRIPE", size):
        for mine in parts_of(info, layout):
            for stripe, data in cuts(mine, memory_of(mine, whole)):
                taken = noise(len(data), seed=2)
                stripe_slice(mine, stripe).copy_out(whole[stripe.start : stripe.stop], taken)
                assert taken.tobytes() == data.tobytes()


@given(tensor_layouts(), sizes)
def test_putting_a_share_in_leaves_the_rest_of_the_stripe_alone(
    case: tuple[TensorInfo, PlacementLayout], size: int
) -> None:
    info, layout = case
    ones = np.ones(info.nbytes, np.uint8)
    with mock.patch.object(striping, "STRIPE", size):
        for mine in parts_of(info, layout):
            built = np.zeros(info.nbytes, np.uint8)
            for stripe, data in cuts(mine, memory_of(mine, ones)):
                stripe_slice(mine, stripe).copy_in(data, built[stripe.start : stripe.stop])
            assert [*np.flatnonzero(built)] == [byte for run in mine.iter_ranges() for byte in range(*run)]


@each_value({"dtype": WIDTHS, "lead": range(9)})
def test_every_dtype_is_moved_to_and_from_any_address(dtype: str, lead: int) -> None:
    info = TensorInfo(dtype, (3, 5, 7))
    layout = PlacementLayout(MeshShape((2, 2), (0, 1, 2, 3)), (Sharded(2, 2), Sharded(2)))
    whole, room = noise(lead + info.nbytes)[lead:], noise(lead + info.nbytes, seed=1)[lead:]
    with mock.patch.object(striping, "STRIPE", 12 * dtype_width(dtype)):
        for mine in parts_of(info, layout):
            memory = np.concatenate([noise(lead), memory_of(mine, whole)])[lead:]
            for stripe, data in cuts(mine, memory):
                stripe_slice(mine, stripe).copy_in(data, room[stripe.start : stripe.stop])
                stripe_slice(mine, stripe).copy_out(whole[stripe.start : stripe.stop], data)
            assert memory.tobytes() == memory_of(mine, whole).tobytes()
    assert room.tobytes() == whole.tobytes()


@pytest.mark.parametrize(
    ("placement", "narrow"),
    [
        (Sharded(0), False),
        (Sharded(1), True),
        (Sharded(2), True),
        (Sharded(0, 2), True),
        (Replicated(), False),
        (FlatSharded(3, 150), False),
    ],
    ids=str,
)
def test_parts_in_many_short_runs_are_narrow(placement: Sharded | Replicated | FlatSharded, narrow: bool) -> None:
    layout = PlacementLayout(MeshShape((2,), (0, 1)), (placement,))
    info = TensorInfo("F32", (4, 6, 10))
    first, *_ = parts_of(info, layout)
    assert is_narrow(first) == narrow


@pytest.mark.parametrize(("columns", "narrow"), [(2 * 2**16 - 2, True), (2 * 2**16, False)])
def test_runs_of_a_quarter_of_a_mebibyte_are_not_narrow(columns: int, narrow: bool) -> None:
    layout = PlacementLayout(MeshShape((2,), (0, 1)), (Sharded(1),))
    first, *_ = parts_of(TensorInfo("F32", (3, columns)), layout)
    assert is_narrow(first) == narrow


@given(tensor_layouts())
def test_what_is_narrow_has_several_runs_and_what_is_not_has_few_or_long_ones(
    case: tuple[TensorInfo, PlacementLayout],
) -> None:
    info, layout = case
    with mock.patch.object(striping, "NARROW", 24):
        for mine in parts_of(info, layout):
            runs = len(list(mine.iter_ranges()))
            assert runs > 1 if is_narrow(mine) else runs <= 1 or mine.mean_range_bytes >= 24
