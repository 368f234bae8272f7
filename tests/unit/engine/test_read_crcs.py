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

from holdfast.engine.integrity import file_checksums
from holdfast.engine.integrity.file_checksums import find_corrupt_ranges
from holdfast.engine.integrity.read_crcs import HashingReaderPool, Piece, ReadCrcs, decode_pieces
from holdfast.ondisk.block_crcs import crc64
from holdfast.ondisk.range_checksums import RangeChecksum
from holdfast.storage.direct_io import BufferedReader
from holdfast.storage.reader_pool import ReaderPool

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
    with mock.patch.object(file_checksums, "CHUNK", chunk):
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


def test_adjacent_reads_are_one_piece(tmp_path: Path) -> None:
    """So a million small tensors do not need memory for a million CRCs."""
    path, data = tmp_path / "a", bytes(range(SIZE))
    crcs = ReadCrcs([RangeChecksum(path, 10, 50, 0, "CRC-32", "a range")])
    for position in range(SIZE):
        crcs.add_bytes(path, position, memoryview(data)[position : position + 1])
    assert decode_pieces([crcs.encode()]) == [Piece(0, 10, 50, zlib.crc32(data[10:50]))]
