"""Tests reads out of mapped files: sinks get the same bytes and fragments, whether a file can be mapped or not."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from rankless.engine.io.byte_sinks import MemorySink
from rankless.engine.io.read_mapped import read_mapped
from rankless.engine.plan.file_ranges import FileRange
from rankless.ondisk.block_crcs import BLOCK_BYTES, crc64
from rankless.storage.mapped_ranges import MappedRanges


@pytest.mark.parametrize("is_mapped", [True, False])
@pytest.mark.parametrize("rank", [0, 3])
def test_bytes_and_fragments_are_those_of_the_file(tmp_path: Path, rank: int, is_mapped: bool) -> None:
    data = np.random.default_rng(0).bytes(BLOCK_BYTES + 5 * 2**20)
    (tmp_path / "a").write_bytes(data)
    sizes = [BLOCK_BYTES + 4 * 2**20, 1000, 2**20 - 1000]
    starts = np.cumsum([0, *sizes]).tolist()
    ranges = [FileRange(n, 0, size, 0, 0, start) for n, (size, start) in enumerate(zip(sizes, starts, strict=False))]
    memory = [np.zeros(size, np.uint8) for size in sizes]
    moved: list[int] = []
    with mock.patch.object(MappedRanges, "map_range", MappedRanges.map_range if is_mapped else lambda *_: None):
        fragments = read_mapped(
            [tmp_path / "a"], ranges, rank, lambda n: MemorySink(memory[n]), moved.append, hashed=True
        )
    assert b"".join(map(bytes, memory)) == data
    assert sum(moved) == len(data)
    for number, of_tensor in fragments.items():
        stored = data[starts[number] : starts[number + 1]]
        assert [(start, stop) for start, stop, _ in of_tensor] == [
            (start, min(start + BLOCK_BYTES, len(stored))) for start in range(0, len(stored), BLOCK_BYTES)
        ]
        assert all(crc == crc64(stored[start:stop]) for start, stop, crc in of_tensor)


def test_without_hashes_there_are_no_fragments(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    memory = np.zeros(5, np.uint8)
    ranges = [FileRange(0, 0, 5, 0, 0, 0)]
    assert not read_mapped([tmp_path / "a"], ranges, 0, lambda _: MemorySink(memory), lambda _: None, hashed=False)
    assert bytes(memory) == b"12345"
