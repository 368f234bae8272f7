"""Tests the partition of replicated data over ranks: everything once, no tiny pieces, and balanced sizes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankless.engine.plan import equal_shares as sharing
from rankless.engine.plan.equal_shares import split_evenly
from rankless.engine.plan.file_ranges import FileRange
from tests.helpers.examples import examples
from tests.helpers.simulated_jobs import count_bytes

#: Makes shares out of few bytes.
SMALLEST = 64


@pytest.fixture
def small() -> Iterator[None]:
    with mock.patch.object(sharing, "MIN_SHARE", SMALLEST):
        yield


@st.composite
def neighbours(draw: st.DrawFn, sizes: st.SearchStrategy[int]) -> list[FileRange]:
    """Pieces one after another in a file, some with gaps between them."""
    actual, offset = [], 4096
    for tensor, size in enumerate(draw(st.lists(sizes, max_size=8))):
        offset += draw(st.sampled_from([0, 0, 8, 808]))
        start, local = draw(st.integers(0, 100)) * 8, draw(st.integers(0, 100)) * 8
        actual.append(FileRange(tensor, start, start + size, local, 0, offset))
        offset += size
    return actual


some_pieces = neighbours(st.one_of(st.integers(0, 40), st.integers(0, 600)).map(lambda n: 8 * n))
large_pieces = neighbours(st.integers(40 * SMALLEST, 400 * SMALLEST).map(lambda n: 8 * n)).filter(bool)
parts_of = st.integers(1, 9)


def shares(whole: list[FileRange], parts: int) -> list[Sequence[FileRange]]:
    return [split_evenly(whole, part, parts) for part in range(parts)]


def joined(pieces: Sequence[FileRange]) -> list[FileRange]:
    """Pieces that go on where the one before ends, as one; empty ones left out."""
    result: list[FileRange] = []
    for piece in pieces:
        if piece.start == piece.stop:
            continue
        last = result[-1] if result else None
        if last and (last.tensor, last.stop) == (piece.tensor, piece.start):
            size = last.stop - last.start
            assert (piece.local, piece.offset) == (last.local + size, last.offset + size)
            result[-1] = last._replace(stop=piece.stop)
        else:
            result.append(piece)
    return result


@given(some_pieces, parts_of)
@settings(max_examples=examples(200))
def test_shares_are_all_of_the_pieces_in_order_and_nothing_twice(
    small: None, whole: list[FileRange], parts: int
) -> None:
    every = [piece for share in shares(whole, parts) for piece in share]
    assert joined(every) == joined(whole)


@given(some_pieces, parts_of)
@settings(max_examples=examples(200))
def test_no_share_has_a_crumb_of_a_piece(small: None, whole: list[FileRange], parts: int) -> None:
    """A piece is cut on whole sectors of the file into what is worth a write, or not at all."""
    sizes = {piece.tensor: piece.stop - piece.start for piece in whole}
    ends = {(piece.tensor, edge) for piece in whole for edge in (piece.offset, piece.offset + sizes[piece.tensor])}
    for piece in itertools.chain(*shares(whole, parts)):
        size = piece.stop - piece.start
        assert size in {0, sizes[piece.tensor]} or size >= SMALLEST
        for edge in (piece.offset, piece.offset + size):
            assert (piece.tensor, edge) in ends or edge % SMALLEST == 0


@given(some_pieces, parts_of)
def test_shares_are_equal_but_for_what_cannot_be_cut(small: None, whole: list[FileRange], parts: int) -> None:
    for share in shares(whole, parts):
        assert abs(count_bytes(share) - count_bytes(whole) / parts) <= 4 * SMALLEST


@given(large_pieces, parts_of)
def test_shares_of_large_pieces_are_about_equal(small: None, whole: list[FileRange], parts: int) -> None:
    sizes = [count_bytes(share) for share in shares(whole, parts)]
    assert max(sizes) <= 1.2 * min(sizes)


def test_pieces_under_a_mebibyte_have_one_writer() -> None:
    whole = [FileRange(0, 0, 4 * 2**20, 0, 0, 4096)]
    sizes = [piece.stop - piece.start for share in shares(whole, 16) for piece in share]
    assert sum(sizes) == 4 * 2**20
    assert min(size for size in sizes if size) >= 2**20
