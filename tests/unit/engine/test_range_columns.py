"""Tests of the ranges of striped shards as columns: they are the bytes of the shard, in order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankless.engine.plan import range_columns
from rankless.engine.plan.layout_types import coordinate_of_rank
from rankless.engine.plan.range_columns import TensorRanges
from rankless.engine.plan.save_plan import StripedShard, TensorSpan
from rankless.engine.plan.shard_byte_ranges import local_shard
from tests.helpers.examples import examples
from tests.helpers.placements import tensor_layouts

#: A chunk of the tests, in bytes.
CHUNK = 16


@pytest.fixture(autouse=True, scope="module")
def _small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(range_columns, "CHUNK", CHUNK)
        yield


@st.composite
def striped_shards(draw: st.DrawFn) -> StripedShard:
    """A shard of any layout, of a tensor that is stored as one, or split into several."""
    info, layout = draw(tensor_layouts())
    rank = draw(st.sampled_from(layout.mesh.ranks))
    coordinate = coordinate_of_rank(layout, rank)
    assert coordinate is not None
    shard = local_shard(info, layout.division, coordinate)
    edges = sorted({0, info.nbytes, *draw(st.lists(st.integers(0, info.nbytes), max_size=3))})
    spans = [
        TensorSpan(start, stop, number, draw(st.integers(0, 40)), 0, start)
        for number, (start, stop) in enumerate(pairwise(edges))
    ]
    return StripedShard(shard, spans or [TensorSpan(0, 0, 0, 0, 0, 0)])


@given(striped=striped_shards())
@settings(max_examples=examples(300))
def test_the_ranges_are_the_bytes_of_the_shard_in_order(striped: StripedShard) -> None:
    ranges = TensorRanges.of_striped_shard(striped)
    rows = list(zip(*(column.tolist() for column in ranges), strict=True))
    expected = [
        (file_range.tensor, position)
        for file_range in striped.iter_ranges()
        for position in range(file_range.start, file_range.stop)
    ]
    assert [(tensor, position) for tensor, start, stop in rows for position in range(start, stop)] == expected
    assert all(start < stop <= start // CHUNK * CHUNK + CHUNK for _, start, stop in rows)
