"""Tests ranges of mapped files: their bytes are those of the file, and what cannot be read is an error."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from rankless.errors import CorruptCheckpointError, StorageError
from rankless.storage import mapped_ranges
from rankless.storage.direct_io import BufferedReader
from rankless.storage.mapped_ranges import MappedRanges


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(np.random.default_rng(0).bytes(3 * mmap.PAGESIZE + 100))
    return path


def advice_that_fails(code: int) -> mock.Mock:
    real = mmap.mmap

    class Failing(real):  # type: ignore[misc, valid-type]
        def madvise(self, option: int, *place: int) -> None:
            if option == mapped_ranges._POPULATE_READ:
                raise OSError(code, "failed")
            super().madvise(option, *place)

    return mock.patch.object(mapped_ranges.mmap, "mmap", Failing)


def test_any_range_has_the_bytes_of_the_file(file: Path) -> None:
    data = file.read_bytes()
    with MappedRanges() as mappings:
        for start, stop in [(0, len(data)), (1, 2), (mmap.PAGESIZE, 2 * mmap.PAGESIZE), (mmap.PAGESIZE - 1, 5000)]:
            mapped = mappings.map_range(file, start, stop - start)
            assert mapped is not None
            assert bytes(mapped) == data[start:stop]
    assert bytes(mapped) == data[mmap.PAGESIZE - 1 : 5000]  # it outlives the block


def test_a_file_that_ends_before_is_truncated(file: Path) -> None:
    with MappedRanges() as mappings, pytest.raises(CorruptCheckpointError, match=f"{file} ends at byte .* truncated"):
        mappings.map_range(file, 10, file.stat().st_size)


def test_a_page_that_cannot_be_read_is_an_error_and_does_not_kill_the_process(file: Path) -> None:
    with (
        advice_that_fails(errno.EFAULT),
        MappedRanges() as mappings,
        pytest.raises(StorageError, match=f"could not read {file}: Input/output error"),
    ):
        mappings.map_range(file, 0, 10)


def test_advice_that_is_refused_fails_no_read(file: Path) -> None:
    with mock.patch.object(os, "posix_fadvise", side_effect=OSError(errno.EINVAL, "")), MappedRanges() as mappings:
        mapped = mappings.map_range(file, 0, 10)
    assert mapped is not None
    assert bytes(mapped) == file.read_bytes()[:10]


def test_what_cannot_be_mapped_must_be_read(file: Path, tmp_path: Path) -> None:
    with advice_that_fails(errno.EINVAL), MappedRanges() as mappings:  # Linux before 5.14
        assert mappings.map_range(file, 0, 10) is None
    (tmp_path / "empty").touch()
    with MappedRanges() as mappings:
        assert mappings.map_range(tmp_path / "empty", 0, 0) is None
    with MappedRanges() as mappings, pytest.raises(StorageError, match="could not open"):
        mappings.map_range(tmp_path / "missing", 0, 1)


def test_a_fifo_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with MappedRanges() as mappings:
        assert mappings.map_range(tmp_path / "fifo", 0, 10) is None
    with BufferedReader(tmp_path / "fifo") as reader, pytest.raises(StorageError, match="could not read"):
        reader.read(0, memoryview(bytearray(10)))
