"""Tests reads without read-ahead: the same bytes and errors, and only for ranges that are not cached."""

from __future__ import annotations

import errno
import os
import platform
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankless.engine.io.read import read_file_ranges, read_host_shared
from rankless.engine.io.tensor_bytes import TensorBytes
from rankless.engine.plan.file_ranges import FileRange
from rankless.errors import CorruptCheckpointError, StorageError
from rankless.storage import exact_reader
from rankless.storage.direct_io import SECTOR_BYTES
from rankless.storage.exact_reader import ExactReaderFactory, is_cached
from tests.helpers.examples import examples


def noise(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


@contextmanager
def always_direct() -> Iterator[mock.Mock]:
    """Every range, however small and whatever file system it is on. Gives the reads."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(exact_reader, "_MIN_BYTES", 0))
        stack.enter_context(mock.patch.object(exact_reader, "is_cached", return_value=False))
        stack.enter_context(mock.patch.object(exact_reader, "_is_on_disk", return_value=True))
        yield stack.enter_context(mock.patch.object(os, "preadv", wraps=os.preadv))


@given(
    st.integers(1, 8 * SECTOR_BYTES),
    st.integers(0, 8 * SECTOR_BYTES),
    st.integers(0, 8 * SECTOR_BYTES),
    st.sampled_from([1, 2, 9]),
)
@settings(max_examples=examples(80))
def test_any_range_is_read(tmp_path_factory, size: int, one: int, two: int, sectors: int) -> None:
    data = noise(size)
    file = tmp_path_factory.mktemp("uncached") / "data"
    file.write_bytes(data)
    start, stop = sorted((min(one, size), min(two, size)))
    into, again = bytearray(stop - start), bytearray(stop - start)
    with always_direct() as reads, ExactReaderFactory(sectors * SECTOR_BYTES)(file) as reader:
        reader.read(start, memoryview(into))
        parts = [bytes(part) for part in reader.read_in_chunks(start, memoryview(again))]
    assert into == again == b"".join(parts) == data[start:stop]
    assert all(call.args[2] % SECTOR_BYTES == 0 == len(call.args[1][0]) % SECTOR_BYTES for call in reads.call_args_list)


@pytest.mark.parametrize(
    "start",
    [0, 1, SECTOR_BYTES, SECTOR_BYTES + 100, 2 * SECTOR_BYTES + 99, 2 * SECTOR_BYTES + 100, 3 * SECTOR_BYTES, 10**6],
)
def test_a_file_that_ends_inside_of_what_is_read_is_named_as_cut_short(tmp_path: Path, start: int) -> None:
    file = tmp_path / "data"
    file.write_bytes(noise(2 * SECTOR_BYTES + 100))
    with (
        always_direct(),
        ExactReaderFactory()(file) as reader,
        pytest.raises(CorruptCheckpointError, match=f"{file}.*is truncated"),
    ):
        reader.read(start, memoryview(bytearray(3 * SECTOR_BYTES)))


def test_reads_that_end_early_are_gone_on_with(tmp_path: Path) -> None:
    data, plain = noise(5 * SECTOR_BYTES + 7), os.preadv
    file, into = tmp_path / "data", bytearray(5 * SECTOR_BYTES)
    file.write_bytes(data)
    with (
        always_direct(),
        mock.patch.object(os, "preadv", lambda fd, views, at: plain(fd, [views[0][:SECTOR_BYTES]], at)),
        ExactReaderFactory()(file) as reader,
    ):
        reader.read(3, memoryview(into))
    assert into == data[3 : 5 * SECTOR_BYTES + 3]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_where_the_file_system_cannot_read_so_the_page_cache_is_used(tmp_path: Path, number: int) -> None:
    data, plain = noise(3 * SECTOR_BYTES), os.preadv
    file, into = tmp_path / "data", bytearray(SECTOR_BYTES)
    file.write_bytes(data)

    def refuse(fd: int, views: list[memoryview], at: int) -> int:
        if at % SECTOR_BYTES == 0:
            raise OSError(number, "refused")
        return plain(fd, views, at)

    with always_direct(), mock.patch.object(os, "preadv", refuse), ExactReaderFactory()(file) as reader:
        reader.read(5, memoryview(into))
    assert into == data[5 : SECTOR_BYTES + 5]


def test_an_error_of_the_disk_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(noise(SECTOR_BYTES))
    error = OSError(errno.EIO, "Input/output error")
    with (
        always_direct(),
        mock.patch.object(os, "preadv", side_effect=error),
        ExactReaderFactory()(file) as reader,
        pytest.raises(StorageError, match=f"could not read {file}"),
    ):
        reader.read(0, memoryview(bytearray(SECTOR_BYTES)))


@pytest.mark.parametrize("nbytes", [2**20 - 1, 2**20])
@pytest.mark.parametrize("cached", [True, False])
def test_only_large_ranges_that_are_not_cached_are_read_past_the_cache(
    tmp_path: Path, nbytes: int, cached: bool
) -> None:
    file = tmp_path / "data"
    file.write_bytes(noise(2**20 + SECTOR_BYTES))
    with (
        mock.patch.object(exact_reader, "is_cached", return_value=cached),
        mock.patch.object(exact_reader, "_is_on_disk", return_value=True),
        mock.patch.object(os, "preadv", wraps=os.preadv) as reads,
        ExactReaderFactory()(file) as reader,
    ):
        reader.read(1, memoryview(bytearray(nbytes)))
    assert (reads.call_args_list[0].args[2] == 0) == (nbytes == 2**20 and not cached)


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    """A folder on a disk, where the kernel can tell what of it is cached."""
    release = tuple(int(number) for number in re.findall(r"\d+", platform.release())[:2])
    if release < (6, 5) or not os.major(tmp_path.stat().st_dev):
        pytest.skip("a kernel before 6.5, or a folder for temporary files that is in memory")
    return tmp_path


@contextmanager
def opened(file: Path) -> Iterator[int]:
    fd = os.open(file, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def forget(fd: int) -> None:
    """Take a file out of the page cache."""
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def test_what_has_been_read_is_cached_until_it_is_forgotten(on_disk: Path) -> None:
    file, size = on_disk / "data", 2**20
    file.write_bytes(noise(size))
    with opened(file) as fd:
        assert is_cached(fd, 0, size)
        forget(fd)
        assert not is_cached(fd, 0, size)
        os.pread(fd, size // 2, 0)
        assert is_cached(fd, 0, size // 2)


@pytest.mark.parametrize("common", [False, True])
def test_what_one_rank_reads_leaves_the_cache_as_it_is_and_what_several_read_goes_there(
    on_disk: Path, common: bool
) -> None:
    file, size = on_disk / "data", 2 * 2**20
    file.write_bytes(noise(size))
    tensor = torch.zeros(size, dtype=torch.uint8)
    piece = FileRange(tensor=0, start=0, stop=size, local=0, file=0, offset=0)
    with opened(file) as fd:
        forget(fd)
        if common:
            read_host_shared([file], [piece], 0, lambda _: TensorBytes(tensor))
        else:
            read_file_ranges([file], [piece], lambda _: TensorBytes(tensor))
        assert is_cached(fd, 0, size) == common
    assert tensor.numpy().tobytes() == noise(size)


@pytest.mark.parametrize("nbytes", [2**20 - SECTOR_BYTES, 2**20])
def test_nothing_after_a_large_range_is_read_from_a_network_file_system(on_disk: Path, nbytes: int) -> None:
    file, start, data = on_disk / "data", 5, noise(4 * 2**20)
    file.write_bytes(data)
    into = bytearray(nbytes)
    with (
        opened(file) as fd,
        mock.patch.object(exact_reader, "_is_on_disk", return_value=False),
        ExactReaderFactory()(file) as reader,
    ):
        forget(fd)
        reader.read(start, memoryview(into))
        assert is_cached(fd, start, nbytes)
        assert is_cached(fd, start + nbytes + SECTOR_BYTES, 16 * SECTOR_BYTES) == (nbytes < 2**20)
    assert into == data[start : start + nbytes]


def test_where_the_system_cannot_tell_all_is_taken_to_be_cached() -> None:
    assert is_cached(-1, 0, 2**20)


def test_no_file_stays_open(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(b"x")

    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = descriptors()
    with always_direct(), ExactReaderFactory()(file):
        assert descriptors() == before + 2
    assert descriptors() == before
    with (
        always_direct(),
        mock.patch.object(exact_reader, "open_direct", side_effect=OSError(errno.EMFILE, "Too many open files")),
        pytest.raises(StorageError, match=str(file)),
    ):
        ExactReaderFactory()(file)
    assert descriptors() == before
