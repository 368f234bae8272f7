"""Tests of writes from memory: through a buffer past the page cache, or from the tensors themselves through it."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from rankless.engine.io.tensor_bytes import TensorBytes
from rankless.engine.io.write import write_file_ranges
from rankless.engine.plan.file_ranges import FileRange
from rankless.ondisk.block_crcs import crc64
from rankless.storage.direct_io import BufferedWriter, DirectWriter, FileWriter

#: Bytes of a tensor, and its place in the file: more than one chunk, and not at the beginning of a page.
SIZE, OFFSET = 9 * 2**20 + 24, 1000


def make_file(folder: Path) -> Path:
    file = folder / "data"
    file.write_bytes(bytes(OFFSET + SIZE))
    return file


def file_range(size: int = SIZE) -> FileRange:
    return FileRange(0, 0, size, 0, 0, OFFSET)


@pytest.mark.parametrize("open_writer", [DirectWriter, BufferedWriter])
@pytest.mark.parametrize("is_contiguous", [True, False])
def test_the_bytes_of_a_tensor_are_written_and_hashed(
    tmp_path: Path, open_writer: type[FileWriter], *, is_contiguous: bool
) -> None:
    file, matrix = make_file(tmp_path), torch.arange(SIZE // 8, dtype=torch.int64).reshape(3, -1)
    tensor = matrix if is_contiguous else matrix.T
    expected = tensor.contiguous().numpy().tobytes()
    fragments = write_file_ranges([file], [file_range()], lambda _: TensorBytes(tensor), open_writer=open_writer)
    assert file.read_bytes()[OFFSET:] == expected
    for fragment in fragments[0]:
        assert fragment.crc == crc64(np.frombuffer(expected, np.uint8)[fragment.start : fragment.stop])


def test_memory_that_changes_while_it_is_written_has_the_crc_of_what_was_written(tmp_path: Path) -> None:
    """Another thread must not change a tensor. A checkpoint that cannot be loaded would be the worse answer."""
    file, tensor = make_file(tmp_path), torch.zeros(SIZE, dtype=torch.uint8)

    class ChangingWriter(BufferedWriter):
        def write(self, offset: int, data: memoryview) -> None:
            tensor[:: 2**20] += 1
            super().write(offset, data)
            tensor[:: 2**20] += 1

    fragments = write_file_ranges([file], [file_range()], lambda _: TensorBytes(tensor), open_writer=ChangingWriter)
    written = np.frombuffer(file.read_bytes(), np.uint8)[OFFSET:]
    assert written.any()
    for fragment in fragments[0]:
        assert fragment.crc == crc64(written[fragment.start : fragment.stop])


@pytest.mark.parametrize(("files", "threads"), [(1, 2), (3, 3), (9, 4)])
def test_few_threads_wait_for_the_lock_of_a_file_in_memory(tmp_path: Path, files: int, threads: int) -> None:
    """A write that copies locks its file. Before, four threads wrote one file after another and waited for its lock."""
    first_file = dict[int, int]()
    all_write = threading.Barrier(threads)

    class TogetherWriter(BufferedWriter):
        def write(self, offset: int, data: memoryview) -> None:
            if threading.get_ident() not in first_file:
                first_file[threading.get_ident()] = int(self._path.name)
                all_write.wait(30)
            super().write(offset, data)

    paths = [tmp_path / str(number) for number in range(files)]
    for path in paths:
        path.write_bytes(bytes(SIZE))
    ranges = [FileRange(number, 0, SIZE, 0, number, 0) for number in range(files)]
    tensors = [torch.full((SIZE,), number + 1, dtype=torch.uint8) for number in range(files)]
    write_file_ranges(paths, ranges, lambda number: TensorBytes(tensors[number]), open_writer=TogetherWriter)
    assert sorted(first_file.values()) == sorted([*range(files), 0][:threads])
    assert [path.read_bytes() for path in paths] == [tensor.numpy().tobytes() for tensor in tensors]
