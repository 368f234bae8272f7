"""Tests the tables of parts: what is written is read, any change is noticed, and ranges end at pages and blocks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankless.engine.plan.file_ranges import FileRange
from rankless.errors import CorruptCheckpointError
from rankless.ondisk.block_crcs import BLOCK_BYTES
from rankless.save.generation_content import split_at_pages
from rankless.storage.direct_io import SECTOR_BYTES
from rankless.tier.part import PartTable, find_corrupt_range, hash_ranges
from rankless.tier.part_names import GenerationKey, PartName, parse_generation_name, parse_part_name

KEY = GenerationKey(3, 17, "0123456789abcdef")
NAME = PartName(KEY, 2, 4)


def make_table() -> tuple[PartTable, np.ndarray]:
    memory = np.arange(300, dtype=np.uint8)
    ranges = [FileRange(0, 0, 100, 0, 0, 4096), FileRange(5, 40, 240, 100, 1, 8000)]
    return PartTable(NAME, "slot.data", 300, hash_ranges(ranges, memory)), memory


def test_a_table_is_read_as_it_was_written() -> None:
    table, _ = make_table()
    decoded = PartTable.decode(table.encode(), "file")
    assert decoded[:3] == table[:3]
    assert list(decoded.rows.iter_ranges()) == list(table.rows.iter_ranges())


@given(st.data())
def test_any_changed_byte_of_a_table_is_noticed(data: st.DataObject) -> None:
    raw = bytearray(make_table()[0].encode())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptCheckpointError):
        PartTable.decode(bytes(raw), "file")


@given(st.binary(max_size=40))
def test_any_other_bytes_are_no_table(raw: bytes) -> None:
    with pytest.raises(CorruptCheckpointError):
        PartTable.decode(raw, "file")


@given(st.integers(0, 299), st.integers(1, 255))
def test_any_changed_byte_of_a_part_is_found(at: int, change: int) -> None:
    table, memory = make_table()
    assert find_corrupt_range(table, memory) is None
    memory[at] ^= change
    corrupt = find_corrupt_range(table, memory)
    assert corrupt is not None
    assert corrupt.local <= at < corrupt.local + corrupt.stop - corrupt.start


def test_ranges_end_at_blocks_of_their_tensor() -> None:
    memory = np.zeros(BLOCK_BYTES + 20, np.uint8)
    rows = hash_ranges([FileRange(0, 10, BLOCK_BYTES + 30, 0, 0, 4096)], memory)
    assert [(found.start, found.stop) for found, _ in rows.iter_ranges()] == [
        (10, BLOCK_BYTES),
        (BLOCK_BYTES, BLOCK_BYTES + 30),
    ]


def test_names_are_parsed_and_sorted_from_the_oldest_to_the_newest() -> None:
    assert parse_part_name(NAME.name) == NAME
    assert parse_part_name(NAME.parity_name) is None
    assert parse_part_name(NAME.parity_name, "parity") == NAME
    assert parse_generation_name(NAME.name) == parse_generation_name(f"{KEY.name}.common") == KEY
    assert parse_generation_name("tier.json") is None
    assert GenerationKey(3, 18, "0" * 16).name > KEY.name > GenerationKey(2, 99, "f" * 16).name


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5 * SECTOR_BYTES), st.integers(1, 9000)), max_size=8))
def test_whole_pages_and_edges_make_up_all_bytes(places: list[tuple[int, int, int]]) -> None:
    ranges, taken = [], set()
    for number, (file, offset, size) in enumerate(places):
        spot = {(file, at) for at in range(offset, offset + size)}
        if not spot & taken:
            taken |= spot
            ranges.append(FileRange(number, 0, size, number * 10_000, file, offset))
    whole, edges = split_at_pages(ranges)
    cut = [*whole, *edges]
    assert {(one.file, at) for one in cut for at in range(one.offset, one.offset + one.stop - one.start)} == taken
    assert sum(one.stop - one.start for one in cut) == len(taken)
    pages = {
        (one.file, at // SECTOR_BYTES) for one in whole for at in range(one.offset, one.offset + one.stop - one.start)
    }
    for file, page in pages:
        assert {(file, at) for at in range(page * SECTOR_BYTES, (page + 1) * SECTOR_BYTES)} <= taken
