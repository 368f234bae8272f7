"""Tests that tensors stored in boxes, or in another order, read like row-major tensors in a file of their own."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankless.engine.io import source_reader as engine
from rankless.engine.io.source_reader import SourceReader
from rankless.engine.io.tensor_sources import (
    ChunkedSource,
    InMemorySource,
    SourceChunk,
    StridedLocation,
    is_row_major,
    row_major_strides,
)
from rankless.engine.plan.element_ranges import IndexBox
from rankless.storage import reader_pool
from rankless.storage.direct_io import BufferedReader
from tests.helpers.boxes import box_slices, split_box

WIDTHS = (1, 2, 4, 8)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    width = draw(st.sampled_from(WIDTHS))
    values = np.arange(math.prod(shape), dtype=f"u{width}") * 7 + 1
    return values.reshape(shape)


def written(path: Path, array: np.ndarray, boxes: list[IndexBox], orders: list[tuple[int, ...]]) -> ChunkedSource:
    """Each box in the file, with its dimensions in some order, and a few bytes in between."""
    raw, parts = b"", []
    for box, order in zip(boxes, orders, strict=True):
        raw += b"\xff" * 3
        inside = array[box_slices(box)]
        turned = inside.transpose(order).copy()
        strides = [0] * array.ndim
        for dim, stride in zip(order, row_major_strides(turned.shape, array.itemsize), strict=True):
            strides[dim] = stride
        place = StridedLocation(path, len(raw), tuple(strides))
        parts.append(SourceChunk(box, lambda place=place: place, place[:2]))
        raw += turned.tobytes()
    path.write_bytes(raw)
    return ChunkedSource(array.shape, array.itemsize, tuple(parts))


@given(arrays(), st.data())
def test_any_range_of_any_boxes_in_any_order(tmp_path: Path, array: np.ndarray, data: st.DataObject) -> None:
    draw = data.draw
    boxes = draw(st.permutations(draw(st.composite(split_box)(IndexBox((0,) * array.ndim, array.shape)))))
    orders = [draw(st.permutations(range(array.ndim))) for _ in boxes]
    woven = written(tmp_path / "data", array, boxes, [tuple(order) for order in orders])
    start = draw(st.integers(0, array.size - 1))
    stop = draw(st.integers(start + 1, array.size))
    buffer = bytearray((stop - start) * array.itemsize)
    with SourceReader([woven]) as opened:
        opened.read(0, start * array.itemsize, memoryview(buffer))
    assert buffer == array.reshape(-1)[start:stop].tobytes()


@pytest.mark.parametrize("limits", [(8, 1, 1), (64, 4, 4), (2**20, 16, 2)])
def test_however_little_is_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: tuple[int, ...]
) -> None:
    for name, limit in zip(("_MAX_SPAN", "_SMALL", "_SPARSE"), limits, strict=True):
        monkeypatch.setattr(engine, name, limit)
    array = np.arange(7 * 5 * 6, dtype="u4").reshape(7, 5, 6)
    woven = written(tmp_path / "data", array, [IndexBox((0, 0, 0), array.shape)], [(2, 0, 1)])
    buffer = bytearray(array.nbytes)
    with SourceReader([woven]) as opened:
        opened.read(0, 0, memoryview(buffer))
    assert buffer == array.tobytes()


def test_of_a_box_beside_others_only_what_is_wanted_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two halves of the columns: 100 rows of a tensor of 8 MB are 100 rows of each half, in one read each."""
    array = np.arange(1000 * 2000, dtype="u4").reshape(1000, 2000)
    halves = [IndexBox((0, 0), (1000, 1000)), IndexBox((0, 1000), (1000, 1000))]
    woven = written(tmp_path / "data", array, halves, [(0, 1)] * 2)
    sizes = []
    plain = BufferedReader.read
    monkeypatch.setattr(
        BufferedReader, "read", lambda self, offset, into: (sizes.append(len(into)), plain(self, offset, into))[1]
    )
    buffer = bytearray(100 * 2000 * 4)
    with SourceReader([woven]) as opened:
        opened.read(0, 300 * 2000 * 4, memoryview(buffer))
    assert buffer == array[300:400].tobytes()
    assert sizes == [100 * 1000 * 4] * 2


def test_bytes_that_are_here_already() -> None:
    buffer = bytearray(3)
    with SourceReader([InMemorySource(b"abcdef")]) as opened:
        opened.read(0, 2, memoryview(buffer))
    assert buffer == b"cde"


def test_more_files_than_a_process_may_have_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_pool, "max_open_files", lambda: 3)
    paths = [tmp_path / str(number) for number in range(10)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]))
    before = len(list(Path("/proc/self/fd").iterdir()))
    with SourceReader(paths) as opened:
        for _ in range(2):
            for number in range(10):
                buffer = bytearray(1)
                opened.read(number, 0, memoryview(buffer))
                assert buffer == bytes([number])
        assert len(list(Path("/proc/self/fd").iterdir())) == before + 3
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [((), (), True), ((3,), (4,), True), ((1, 3), (99, 4), True), ((2, 3), (4, 8), False), ((0, 3), (1, 1), True)],
)
def test_row_major(shape: tuple[int, ...], strides: tuple[int, ...], expected: bool) -> None:
    assert is_row_major(shape, strides, 4) is expected
