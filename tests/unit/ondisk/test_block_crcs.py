"""Tests block CRCs against CRC-64/NVME computed bit by bit from its specification."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankless.ondisk import block_crcs
from rankless.ondisk.block_crcs import BLOCK_BYTES, Fragment
from tests.helpers.crc import ONES, crc64_by_bits

#: Small enough for the slow CRC, large enough for several fragments.
SMALL_BLOCK = 64


def cut(data: bytes, places: list[int]) -> list[tuple[int, int]]:
    """Ranges that tile the data, cut at some places and at the ends of blocks."""
    edges = {place % (len(data) + 1) for place in places} | set(range(0, len(data), SMALL_BLOCK)) | {0, len(data)}
    ordered = sorted(edges)
    return list(itertools.pairwise(ordered))


def fragments_of(data: bytes, places: list[int]) -> list[Fragment]:
    return [Fragment(start, stop, crc64_by_bits(data[start:stop])) for start, stop in cut(data, places)]


def crcs_of_blocks(data: bytes) -> list[int]:
    return [crc64_by_bits(data[start : start + SMALL_BLOCK]) for start in range(0, len(data), SMALL_BLOCK)]


some_bytes = st.binary(max_size=5 * SMALL_BLOCK)
some_places = st.lists(st.integers(0, 10**6), max_size=12)


def test_the_check_value_is_that_of_the_standard() -> None:
    assert crc64_by_bits(b"123456789") == block_crcs.crc64(b"123456789") == 0xAE8B14860A799888


@given(some_bytes)
def test_the_crc_is_that_of_the_specification(data: bytes) -> None:
    assert block_crcs.crc64(data) == crc64_by_bits(data)


@given(some_bytes, some_places)
def test_the_crcs_of_neighbours_join_to_the_crc_of_the_whole(data: bytes, places: list[int]) -> None:
    pieces = [(crc64_by_bits(data[start:stop]), stop - start) for start, stop in cut(data, places)]
    assert block_crcs.combine_crcs(pieces) == crc64_by_bits(data)


def test_nothing_joins_to_the_crc_of_no_bytes() -> None:
    assert block_crcs.combine_crcs([]) == crc64_by_bits(b"") == 0


@given(st.integers(0, 10**12))
def test_blocks_tile_a_tensor(nbytes: int) -> None:
    n = block_crcs.count_blocks(nbytes)
    edges = [block_crcs.block_range(0, nbytes), block_crcs.block_range(max(n - 1, 0), nbytes)]
    assert edges[0][0] == 0
    assert edges[-1][1] == nbytes
    assert n == 0 or 0 < edges[-1][1] - edges[-1][0] <= block_crcs.BLOCK_BYTES
    assert all(
        block_crcs.block_range(i, nbytes)[1] == block_crcs.block_range(i + 1, nbytes)[0] for i in range(min(n, 3) - 1)
    )


def test_no_bytes_have_no_block() -> None:
    assert block_crcs.count_blocks(0) == 0
    assert block_crcs.assemble_crcs([], 0) == []


@given(some_bytes, st.lists(some_places, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_fragments_of_several_ranks_assemble_to_the_crc_of_each_block(data: bytes, cuts: list, random) -> None:
    """Each block is hashed in fragments by one rank; some ranks hash the same ones."""
    ways = [fragments_of(data, places) for places in cuts]
    result = []
    for block in range(-(-len(data) // SMALL_BLOCK)):
        mine = [fragment for fragment in random.choice(ways) if fragment.start // SMALL_BLOCK == block]
        result += mine * random.choice([1, 1, 3])
    random.shuffle(result)
    with mock.patch.object(block_crcs, "BLOCK_BYTES", SMALL_BLOCK):
        assert block_crcs.assemble_crcs(result, len(data)) == crcs_of_blocks(data)


def damaged(data: bytes, break_one) -> list[int | None]:
    """What assembles after one fragment in the middle of block 1 was replaced."""
    actual = fragments_of(data, [80, 90, 100])
    at = next(i for i, fragment in enumerate(actual) if fragment.start == 80)
    actual[at : at + 1] = break_one(actual[at])
    with mock.patch.object(block_crcs, "BLOCK_BYTES", SMALL_BLOCK):
        return block_crcs.assemble_crcs(actual, len(data))


@pytest.mark.parametrize(
    "break_one",
    [
        pytest.param(lambda _: [], id="gap"),
        pytest.param(lambda case: [case._replace(stop=case.stop - 1)], id="gap-of-one-byte"),
        pytest.param(lambda case: [case._replace(stop=case.stop + 1)], id="overlap"),
        pytest.param(lambda case: [case, case._replace(crc=case.crc ^ 1)], id="two-ranks-say-otherwise"),
        pytest.param(lambda case: [case, case._replace(stop=case.stop - 1)], id="part-hashed-twice"),
        pytest.param(lambda case: [case._replace(stop=200)], id="beyond-its-block"),
    ],
)
def test_a_block_that_is_not_tiled_exactly_has_no_crc_and_leaves_the_others_theirs(break_one) -> None:
    data = bytes(range(200))
    expected = crcs_of_blocks(data)
    actual = damaged(data, break_one)
    assert actual[1] is None
    assert [actual[0], *actual[2:]] == [expected[0], *expected[2:]]


def test_a_block_without_fragments_has_no_crc() -> None:
    with mock.patch.object(block_crcs, "BLOCK_BYTES", SMALL_BLOCK):
        assert block_crcs.assemble_crcs([], 130) == [None, None, None]


@given(st.lists(st.integers(0, ONES)))
def test_crcs_as_text_have_a_fixed_width_and_come_back(crcs: list[int]) -> None:
    text = block_crcs.to_hex(crcs)
    assert len(text) == 16 * len(crcs)
    assert block_crcs.from_hex(text) == crcs


@pytest.mark.parametrize("text", ["0", "0" * 15, "0" * 17, "0" * 15 + "G", "0" * 15 + "A", "0x" + "0" * 14, " " * 16])
def test_text_that_is_no_row_of_crcs_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="16 hexadecimal digits"):
        block_crcs.from_hex(text)


def test_text_with_a_sign_or_separator_inside_is_refused() -> None:
    for text in ("-" + "0" * 15, "1_" + "0" * 14, "0" * 8 + "\u0660" * 8):
        with pytest.raises(ValueError, match="16 hexadecimal digits"):
            block_crcs.from_hex(text)


@pytest.mark.parametrize("nbytes", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES, 3 * BLOCK_BYTES + 7])
def test_sizes_of_blocks_are_those_of_their_ranges(nbytes: int) -> None:
    ranges = [block_crcs.block_range(block, nbytes) for block in range(block_crcs.count_blocks(nbytes))]
    assert block_crcs.block_sizes(nbytes) == [stop - start for start, stop in ranges]
    fragments = [Fragment(start, stop, start + 1) for start, stop in ranges]
    assert block_crcs.assemble_crcs(fragments, nbytes) == [start + 1 for start, _ in ranges]
    assert (
        block_crcs.assemble_crcs(fragments[1:], nbytes)
        == [None, *(start + 1 for start, _ in ranges[1:])][: len(ranges)]
    )
