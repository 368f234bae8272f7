"""Tests that what was read of files need not be read again to compare them with their checksums."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankless.engine.integrity import range_verification, read_crcs
from rankless.engine.integrity.range_verification import find_corrupt_ranges
from rankless.engine.integrity.read_crcs import CrcPiece, HashingReaderPool, ReadCrcs, decode_pieces
from rankless.engine.plan.file_ranges import CHUNK
from rankless.errors import UnstableReadError
from rankless.ondisk.block_crcs import crc64
from rankless.ondisk.range_checksums import RangeChecksum
from rankless.storage.direct_io import BufferedReader
from rankless.storage.reader_pool import ReaderPool

SIZE = 60

CRCS: dict[str, Callable[[bytes], int]] = {"CRC-32": zlib.crc32, "CRC-64": crc64}


@st.composite
def file_ranges(draw: st.DrawFn) -> list[tuple[str, int, int, str]]:
    """Ranges of two files that do not overlap, each with a kind of CRC."""
    result = []
    for name in ("a", "b"):
        edges = sorted(draw(st.sets(st.integers(0, SIZE), max_size=6)))
        for start, stop in itertools.pairwise(edges):
            if draw(st.booleans()):
                result.append((name, start, stop, draw(st.sampled_from(["CRC-32", "CRC-64"]))))
    return result


reads = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, SIZE), st.integers(0, SIZE), st.integers(0, 2)))


@given(file_ranges(), reads, st.sets(st.tuples(st.sampled_from("ab"), st.integers(0, SIZE - 1))), st.integers(1, 70))
def test_the_same_ranges_are_corrupt_whatever_was_read(
    tmp_path: Path,
    ranges: list[tuple[str, int, int, str]],
    reads: list[tuple[str, int, int, int]],
    flipped: set[tuple[str, int]],
    chunk: int,
) -> None:
    content = {name: bytearray(range(first, first + SIZE)) for name, first in (("a", 0), ("b", 100))}
    checksums = [
        RangeChecksum(tmp_path / name, start, stop, CRCS[kind](bytes(content[name][start:stop])), kind, "a range")
        for name, start, stop, kind in ranges
    ]
    for name, position in flipped:
        content[name][position] ^= 1
    for name, data in content.items():
        (tmp_path / name).write_bytes(data)
    by_rank = [ReadCrcs(checksums) for _ in range(3)]
    for name, start, stop, rank in reads:
        with HashingReaderPool(BufferedReader, by_rank[rank]) as readers:
            readers.read(tmp_path / name, min(start, stop), memoryview(bytearray(abs(stop - start))))
    pieces = decode_pieces(crcs.encode() for crcs in by_rank)
    expected = [
        number
        for number, (name, start, stop, _) in enumerate(ranges)
        if any(other == name and start <= position < stop for other, position in flipped)
    ]
    with mock.patch.object(range_verification, "CHUNK", chunk):
        assert [*find_corrupt_ranges(checksums, pieces)] == expected


def test_nothing_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(SIZE))
    checksums = [RangeChecksum(path, 0, 20, zlib.crc32(bytes(20)), "CRC-32", "a range")]
    crcs = ReadCrcs(checksums)
    for start, stop in ((10, 20), (0, 10), (20, 60)):
        crcs.add_bytes(path, start, memoryview(bytes(stop - start)))
    with mock.patch.object(ReaderPool, "read", side_effect=AssertionError):
        assert find_corrupt_ranges(checksums, decode_pieces([crcs.encode()])) == {}
        with pytest.raises(AssertionError):
            find_corrupt_ranges(checksums)


@pytest.mark.parametrize("wrong", [0, 2**32 - 1])
@pytest.mark.parametrize("ranks", [1, 2])
def test_bytes_that_are_right_once_and_wrong_once_are_corrupt(tmp_path: Path, wrong: int, ranks: int) -> None:
    path, data = tmp_path / "a", bytes(range(SIZE))
    path.write_bytes(data)
    checksums = [RangeChecksum(path, 0, SIZE, zlib.crc32(data), "CRC-32", "a range")]
    by_rank = [ReadCrcs(checksums) for _ in range(ranks)]
    by_rank[0].add_bytes(path, 0, memoryview(data))
    with mock.patch.dict(read_crcs.KINDS, {"CRC-32": mock.Mock(compute=lambda _: wrong)}):
        by_rank[-1].add_bytes(path, 0, memoryview(data))
    assert [*find_corrupt_ranges(checksums, decode_pieces(crcs.encode() for crcs in by_rank))] == [0]


def test_bytes_that_only_the_first_read_got_wrong_are_not_corrupt(tmp_path: Path) -> None:
    """A caller that has read them has wrong bytes in its tensors; a verification has nothing to report."""
    path, data = tmp_path / "a", bytes(range(SIZE))
    path.write_bytes(data)
    checksums = [RangeChecksum(path, 0, SIZE, zlib.crc32(data), "CRC-32", "a range")]
    crcs = ReadCrcs(checksums)
    crcs.add_bytes(path, 0, memoryview(bytes(SIZE)))
    (error,) = find_corrupt_ranges(checksums, decode_pieces([crcs.encode()])).values()
    assert isinstance(error, UnstableReadError)
    read, first = BufferedReader.read, [True]

    def read_wrongly_once(self: BufferedReader, offset: int, into: memoryview) -> None:
        read(self, offset, into)
        if first.pop() if first else False:
            into[3] ^= 1

    with mock.patch.object(BufferedReader, "read", read_wrongly_once):
        assert find_corrupt_ranges(checksums) == {}
    assert not first


def test_ranks_that_read_in_another_order_have_equal_pieces(tmp_path: Path) -> None:
    checksums = [RangeChecksum(tmp_path / "a", 0, 3 * CHUNK, 0, "CRC-32", "a range")]
    chunk, pieces = memoryview(bytes(CHUNK)), []
    for order in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        crcs = ReadCrcs(checksums)
        for number in order:
            crcs.add_bytes(tmp_path / "a", number * CHUNK, chunk)
        pieces.append(sorted(crcs.pieces))
    assert pieces[0] == pieces[1] == pieces[2]


def test_adjacent_reads_are_one_piece(tmp_path: Path) -> None:
    """So a million small tensors do not need memory for a million CRCs."""
    path, data = tmp_path / "a", bytes(range(SIZE))
    crcs = ReadCrcs([RangeChecksum(path, 10, 50, 0, "CRC-32", "a range")])
    for position in range(SIZE):
        crcs.add_bytes(path, position, memoryview(data)[position : position + 1])
    assert decode_pieces([crcs.encode()]) == [CrcPiece(0, 10, 50, zlib.crc32(data[10:50]))]
