"""Tests which bytes of a tensor one rank needs and which several do, and who reads the latter."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rankless.engine.plan.element_ranges import ElementRange
from rankless.inference.sharing_plan import SharedRegion, iterate_stripes, split_by_use
from rankless.inference.strided_view import Dimension, StridedView
from rankless.ondisk.block_crcs import BLOCK_BYTES


def rows(start: int, stop: int) -> StridedView:
    """Rows of a matrix of 100 bytes a row."""
    return StridedView(100 * start, 1, (Dimension(100 * (stop - start), 1),))


def columns(start: int, stop: int) -> StridedView:
    """Columns of the 10 rows of that matrix."""
    return StridedView(start, 1, (Dimension(10, 100), Dimension(stop - start, 1)))


def test_rows_of_one_rank_each_are_not_shared() -> None:
    views = {0: [rows(0, 5)], 1: [rows(5, 10)]}
    assert split_by_use(views, 50) == [
        SharedRegion(ElementRange(0, 500), (0,)),
        SharedRegion(ElementRange(500, 1000), (1,)),
    ]


def test_columns_are_one_region_of_all_ranks_if_the_gaps_are_read() -> None:
    views = {rank: [columns(25 * rank, 25 * rank + 25)] for rank in range(4)}
    assert split_by_use(views, 75) == [SharedRegion(ElementRange(0, 1000), (0, 1, 2, 3))]
    assert all(len(region.ranks) == 1 for region in split_by_use(views, 74))


def test_what_ranks_need_of_a_tensor_may_be_shared_in_part() -> None:
    views = {0: [rows(0, 4)], 1: [rows(3, 4), rows(8, 9)], 2: [rows(8, 10)]}
    assert split_by_use(views, 0) == [
        SharedRegion(ElementRange(0, 400), (0, 1)),
        SharedRegion(ElementRange(800, 1000), (1, 2)),
    ]


@given(st.integers(0, 3 * BLOCK_BYTES), st.integers(1, 4 * BLOCK_BYTES), st.integers(0, 9))
def test_stripes_tile_a_region_and_end_at_blocks_and_ranks_own_them_in_turn(start: int, size: int, turn: int) -> None:
    ranks = (1, 4, 6)
    stripes = list(iterate_stripes(7, SharedRegion(ElementRange(start, start + size), ranks), turn))
    assert [stripe.start for stripe in stripes] == [start, *(stripe.stop for stripe in stripes[:-1])]
    assert stripes[-1].stop == start + size
    assert all(stripe.stop % BLOCK_BYTES == 0 for stripe in stripes[:-1])
    assert all(stripe.start // BLOCK_BYTES == (stripe.stop - 1) // BLOCK_BYTES for stripe in stripes)
    assert [stripe.owner for stripe in stripes] == [ranks[(turn + number) % 3] for number in range(len(stripes))]
    assert {(stripe.tensor, stripe.ranks) for stripe in stripes} == {(7, ranks)}
