"""Tests that CRCs of blocks follow from scattered pieces on many ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankless.engine.integrity import block_sums
from rankless.engine.integrity.block_sums import BlockSums, sum_fragments, trust_ranges
from rankless.engine.io.fragments import FragmentTable
from rankless.engine.plan.range_columns import TensorRanges
from rankless.ondisk import block_crcs
from rankless.ondisk.block_crcs import crc64

#: A block of the tests, in bytes.
BLOCK = 64


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_crcs, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(block_sums, "BLOCK_BYTES", BLOCK)


@st.composite
def pieces(draw: st.DrawFn) -> tuple[list[bytes], list[list[tuple[int, int, int]]]]:
    """Tensors, and of each rank the pieces that it holds: a tensor, a start and a stop. They tile all tensors."""
    tensors = draw(st.lists(st.binary(max_size=3 * BLOCK), min_size=1, max_size=3))
    ranks: list[list[tuple[int, int, int]]] = [[] for _ in range(draw(st.integers(1, 4)))]
    for number, data in enumerate(tensors):
        cuts = draw(st.sets(st.integers(0, len(data)), max_size=12))
        edges = sorted({0, len(data), *cuts, *range(0, len(data), BLOCK)})
        for start, stop in itertools.pairwise(edges):
            ranks[draw(st.integers(0, len(ranks) - 1))].append((number, start, stop))
    return tensors, [draw(st.permutations(rank)) for rank in ranks]


def sum_pieces(tensors: list[bytes], of_rank: list[tuple[int, int, int]]) -> BlockSums:
    rows = [(tensor, start, stop, crc64(tensors[tensor][start:stop])) for tensor, start, stop in of_rank]
    columns = list(zip(*rows, strict=True)) or [(), (), (), ()]
    table = FragmentTable(np.array(columns[0], np.uint32), *(np.array(column, np.uint64) for column in columns[1:]))
    return sum_fragments(table, list(map(len, tensors)))


def crcs_of(tensors: list[bytes]) -> dict[int, list[int]]:
    return {
        number: [crc64(data[start : start + BLOCK]) for start in range(0, len(data), BLOCK)]
        for number, data in enumerate(tensors)
    }


def add_ranks(ranks: list[BlockSums]) -> BlockSums:
    return BlockSums.from_bytes([rank.to_bytes() for rank in ranks])


def all_blocks(tensors: list[bytes]) -> dict[int, set[int]]:
    return {number: set(range(len(crcs))) for number, crcs in crcs_of(tensors).items() if crcs}


@given(case=pieces())
def test_all_pieces_give_the_crc_of_each_block(case: tuple[list[bytes], list[list[tuple[int, int, int]]]]) -> None:
    tensors, ranks = case
    total = add_ranks([sum_pieces(tensors, rank) for rank in ranks])
    assert total.matching_blocks(crcs_of(tensors), list(map(len, tensors))) == all_blocks(tensors)


@given(case=pieces(), data=st.data())
def test_a_block_with_a_missing_or_changed_piece_does_not_match(
    case: tuple[list[bytes], list[list[tuple[int, int, int]]]], data: st.DataObject
) -> None:
    tensors, ranks = case
    held = [(rank, piece) for rank, pieces_of_rank in enumerate(ranks) for piece in pieces_of_rank]
    if not held:
        return
    rank, (tensor, start, stop) = data.draw(st.sampled_from(held))
    expected = all_blocks(tensors)
    expected[tensor] -= {start // BLOCK}
    sizes = list(map(len, tensors))
    if data.draw(st.booleans()):
        changed = [bytearray(each) for each in tensors]
        changed[tensor][data.draw(st.integers(start, stop - 1))] ^= data.draw(st.integers(1, 255))
        total = add_ranks([sum_pieces(list(map(bytes, changed)), of_rank) for of_rank in ranks])
    else:
        ranks[rank].remove((tensor, start, stop))
        total = add_ranks([sum_pieces(tensors, of_rank) for of_rank in ranks])
    matching = total.matching_blocks(crcs_of(tensors), sizes)
    assert matching == {number: found for number, found in expected.items() if found}


def to_ranges(pieces: list[tuple[int, int, int]]) -> TensorRanges:
    rows = np.array(pieces, np.uint64).reshape(-1, 3)
    return TensorRanges(rows[:, 0].astype(np.uint32), rows[:, 1], rows[:, 2])


@given(case=pieces())
def test_trusted_bytes_count_until_they_are_hashed(case: tuple[list[bytes], list[list[tuple[int, int, int]]]]) -> None:
    tensors, (first, *others) = case
    sizes, crcs = list(map(len, tensors)), crcs_of(tensors)
    trusted = add_ranks([trust_ranges(to_ranges(first), sizes), *(sum_pieces(tensors, rank) for rank in others)])
    partly = {(tensor, start // BLOCK) for rank in others for tensor, start, _ in rank} & {
        (tensor, start // BLOCK) for tensor, start, _ in first
    }
    found = trusted.matching_blocks(crcs, sizes)
    matching = {(tensor, block) for tensor, of_tensor in found.items() for block in of_tensor}
    # A block that some ranks trust and others have hashed is not known to be unchanged.
    everything = {(tensor, block) for tensor, of_tensor in all_blocks(tensors).items() for block in of_tensor}
    assert matching == everything - partly
    without = trusted.without_trust().matching_blocks(crcs, sizes)
    touched = {(tensor, start // BLOCK) for tensor, start, _ in first}
    assert {(tensor, block) for tensor, found in without.items() for block in found}.isdisjoint(touched)
    later = add_ranks([trusted.without_trust(), sum_pieces(tensors, first)])
    assert later.matching_blocks(crcs, sizes) == all_blocks(tensors)


def test_no_pieces_match_nothing() -> None:
    empty = BlockSums.from_bytes([])
    assert empty.matching_blocks({0: [0]}, [10]) == {}
