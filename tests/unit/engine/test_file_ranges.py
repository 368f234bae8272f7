"""Tests splitting file ranges into chunks, and assembling fragments."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankless.engine.io import read, requests, write
from rankless.engine.io.read_order import WINDOW, rotate_by_rank
from rankless.engine.io.requests import merge_fragments
from rankless.engine.io.tensor_bytes import TensorBytes
from rankless.engine.plan import file_ranges
from rankless.engine.plan.file_ranges import FileRange, IoChunk, alternate_files, file_chunks, tensor_chunks
from rankless.ondisk import block_crcs
from rankless.ondisk.block_crcs import Fragment, crc64
from rankless.process.worker_threads import run_in_threads
from rankless.storage.aligned_memory import BufferPool
from rankless.storage.direct_io import SECTOR_BYTES
from tests.helpers.examples import examples

#: Sizes that make the same shapes with few bytes.
CHUNK, BLOCK = 64, 256


@pytest.fixture(autouse=True)
def small() -> None:
    with (
        mock.patch.object(file_ranges, "CHUNK", CHUNK),
        mock.patch.object(file_ranges, "BLOCK_BYTES", BLOCK),
        mock.patch.object(requests, "BLOCK_BYTES", BLOCK),
        mock.patch.object(block_crcs, "BLOCK_BYTES", BLOCK),
    ):
        yield


@st.composite
def some_pieces(draw: st.DrawFn) -> list[FileRange]:
    """Pieces of several tensors in two files, with and without gaps, ordered by file and offset."""
    result = []
    for file in range(2):
        offset = draw(st.integers(0, 3 * CHUNK))
        for tensor in range(draw(st.integers(0, 5))):
            start, size = draw(st.integers(0, 2 * BLOCK)), draw(st.integers(1, 3 * BLOCK))
            local = draw(st.integers(0, 100))
            result.append(FileRange(10 * file + tensor, start, start + size, local, file, offset))
            offset += size + draw(st.sampled_from([0, 0, 0, 1, CHUNK]))
    return result


def each_byte(pieces: list[FileRange]) -> list[tuple[int, ...]]:
    return [
        (piece.tensor, piece.start + i, piece.local + i, piece.file, piece.offset + i)
        for piece in pieces
        for i in range(piece.stop - piece.start)
    ]


def assert_whole(chunks: list[IoChunk], pieces: list[FileRange]) -> None:
    """The chunks hold every byte of the pieces once, in order; each is one range of one file, in one block a piece."""
    inside = [piece for chunk in chunks for piece in chunk.file_ranges]
    assert each_byte(inside) == each_byte(pieces)
    for chunk in chunks:
        assert 0 < chunk.size <= CHUNK
        reached = chunk.offset
        for piece in chunk.file_ranges:
            assert (piece.file, piece.offset) == (chunk.file, reached)
            assert piece.start // BLOCK == (piece.stop - 1) // BLOCK
            reached += piece.stop - piece.start
        assert reached == chunk.offset + chunk.size


@given(some_pieces())
@settings(max_examples=examples(200))
def test_chunks_for_writing_are_the_pieces_cut_where_the_file_is_aligned(pieces: list[FileRange]) -> None:
    chunks = list(file_chunks(pieces))
    assert_whole(chunks, pieces)
    assert all(chunk.offset // CHUNK == (chunk.offset + chunk.size - 1) // CHUNK for chunk in chunks)


@given(some_pieces())
@settings(max_examples=examples(200))
def test_chunks_for_reading_are_the_pieces_cut_where_the_tensor_is_aligned(pieces: list[FileRange]) -> None:
    chunks = list(tensor_chunks(pieces))
    assert_whole(chunks, pieces)
    whole = {edge for piece in pieces for edge in ((piece.tensor, piece.start), (piece.tensor, piece.stop))}
    cuts = {(p.tensor, edge) for chunk in chunks for p in chunk.file_ranges for edge in (p.start, p.stop)} - whole
    assert all(position % CHUNK == 0 for _, position in cuts)


@given(some_pieces())
def test_neighbours_that_fit_share_a_chunk(pieces: list[FileRange]) -> None:
    for chunk, following in itertools.pairwise(tensor_chunks(pieces)):
        neighbours = (chunk.file, chunk.offset + chunk.size) == (following.file, following.offset)
        first = following.file_ranges[0]
        assert not neighbours or chunk.size + first.stop - first.start > CHUNK


@given(st.lists(st.integers(0, 4)))
def test_files_alternate_as_long_as_they_have_chunks(files: list[int]) -> None:
    chunks = [IoChunk(file, place, 1, ()) for place, file in enumerate(files)]
    alternated = list(alternate_files(chunks))
    assert sorted(alternated) == sorted(chunks)
    for file in set(files):
        assert [chunk for chunk in alternated if chunk.file == file] == [
            chunk for chunk in chunks if chunk.file == file
        ]
    for place, chunk in enumerate(alternated):
        before = alternated[:place]
        turn = sum(other.file == chunk.file for other in before)
        assert all(sum(o.file == file for o in before) >= min(turn, files.count(file)) for file in set(files))


@given(st.integers(0, 200), st.integers(0, 10_000))
def test_every_rank_makes_all_requests_one_window_after_the_other(number: int, rank: int) -> None:
    order = list(rotate_by_rank(range(number), rank))
    assert sorted(order) == list(range(number))
    assert [request // WINDOW for request in order] == [place // WINDOW for place in range(number)]


@given(st.integers(0, 10_000), st.sampled_from([2, 4, 8]))
def test_ranks_of_one_host_begin_at_different_requests_far_apart(first: int, ranks: int) -> None:
    begun = sorted(next(rotate_by_rank(range(WINDOW), rank)) for rank in range(first, first + ranks))
    gaps = [after - before for before, after in itertools.pairwise([*begun, begun[0] + WINDOW])]
    assert min(gaps) >= WINDOW // ranks // 2


@given(some_pieces(), st.integers(0, 500), st.integers(0, 500))
def test_a_piece_is_cut_in_its_tensor_its_memory_and_its_file_alike(
    pieces: list[FileRange], skip: int, size: int
) -> None:
    for piece in pieces:
        first = min(skip, piece.stop - piece.start)
        last = min(first + size, piece.stop - piece.start)
        assert each_byte([piece.slice_bytes(first, last - first)]) == each_byte([piece])[first:last]


@given(
    st.binary(max_size=4 * BLOCK), st.lists(st.integers(0, 4 * BLOCK), max_size=10), st.randoms(use_true_random=False)
)
@settings(max_examples=examples(200))
def test_gathered_fragments_have_the_crcs_of_their_bytes_and_are_as_few_as_can_be(
    data: bytes, cuts: list[int], random
) -> None:
    edges = sorted({0, len(data), *range(0, len(data), BLOCK), *(cut for cut in cuts if cut < len(data))})
    actual = [(7, Fragment(low, high, crc64(data[low:high]))) for low, high in itertools.pairwise(edges)]
    random.shuffle(actual)
    gathered = merge_fragments([actual[: len(actual) // 2], actual[len(actual) // 2 :]])
    expected = [
        Fragment(start, stop, crc64(data[start:stop]))
        for start, stop in (
            block_crcs.block_range(block, len(data)) for block in range(block_crcs.count_blocks(len(data)))
        )
    ]
    assert gathered.get(7, []) == expected
    assert None not in block_crcs.assemble_crcs(gathered.get(7, []), len(data))


@given(st.binary(min_size=1, max_size=3 * BLOCK), st.sets(st.integers(0, 3 * BLOCK), max_size=8), st.data())
def test_a_gap_between_fragments_stays_a_gap(data: bytes, cuts: set[int], drawn) -> None:
    edges = sorted({0, len(data), *range(0, len(data), BLOCK), *(cut for cut in cuts if cut < len(data))})
    actual = [(0, Fragment(low, high, crc64(data[low:high]))) for low, high in itertools.pairwise(edges)]
    lost = actual.pop(drawn.draw(st.integers(0, len(actual) - 1)))[1]
    assembled = block_crcs.assemble_crcs(merge_fragments([actual]).get(0, []), len(data))
    assert [block for block, crc in enumerate(assembled) if crc is None] == [lost.start // BLOCK]


def test_work_in_threads_gives_results_in_order() -> None:
    assert run_in_threads(lambda n: n * n, range(100)) == [n * n for n in range(100)]
    assert run_in_threads(lambda n: n, []) == []


def test_the_first_error_in_a_thread_is_raised_and_stops_the_rest() -> None:
    done = []

    def work(number: int) -> None:
        if number == 3:
            raise ValueError("number 3")
        done.append(number)

    with pytest.raises(ValueError, match="number 3"):
        run_in_threads(work, range(10_000))
    assert len(done) < 10_000


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()])
def test_threads_that_were_started_have_ended_when_one_could_not_be(error: BaseException) -> None:
    plain, started, done = threading.Thread.start, [], []

    def start(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise error
        started.append(thread)
        plain(thread)

    def work(number: int) -> None:
        time.sleep(0.05)
        done.append(number)

    with mock.patch.object(threading.Thread, "start", start), pytest.raises(type(error)):
        run_in_threads(work, range(100))
    assert not any(thread.is_alive() for thread in started)
    assert len(done) <= 4


def test_every_thread_has_one_page_aligned_buffer_of_its_own() -> None:
    buffers = BufferPool(CHUNK)
    gate = threading.Barrier(4)

    def work(_: int) -> tuple[int, int, int]:
        gate.wait(10)
        actual = buffers.get().ctypes.data, buffers.get().ctypes.data, len(buffers.get())
        gate.wait(10)  # a thread that ends lets go of its buffer
        return actual

    actual = run_in_threads(work, range(4))
    assert len({first for first, _, _ in actual}) == 4
    assert all(first == again and first % SECTOR_BYTES == 0 and size == CHUNK for first, again, size in actual)


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[list[torch.Tensor], list[FileRange], int]:
    """Tensors in memory in some way, and where each lies in one file, with gaps."""
    tensors, pieces, offset = [], [], 0
    for number in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.float64]))
        rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 20))
        tensor = torch.randn(rows, columns, generator=torch.Generator().manual_seed(number)).to(dtype)
        tensors.append(tensor.T if draw(st.booleans()) else tensor)
        offset += draw(st.sampled_from([0, 8, 24, SECTOR_BYTES]))
        pieces.append(FileRange(number, 0, tensor.nbytes, 0, 0, offset))
        offset += -(-tensor.nbytes // 8) * 8
    return tensors, pieces, offset


def read_in_common(files, pieces, sink_of) -> dict[int, list[Fragment]]:
    return read.read_host_shared(files, pieces, 3, sink_of)


@given(laid_out(), st.sampled_from([read.read_file_ranges, read_in_common]))
@settings(max_examples=examples(40))
def test_tensors_written_are_in_the_file_and_come_back_with_the_same_crcs(tmp_path_factory, case, read_some) -> None:
    tensors, pieces, size = case
    file: Path = tmp_path_factory.mktemp("transfer") / "data"
    file.write_bytes(bytes(size))
    with mock.patch.object(write, "CHUNK", CHUNK), mock.patch.object(read, "CHUNK", CHUNK):
        written = write.write_file_ranges([file], pieces, lambda n: TensorBytes(tensors[n]))
        raw = file.read_bytes()
        for tensor, piece in zip(tensors, pieces, strict=True):
            flat = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            assert raw[piece.offset : piece.offset + len(flat)] == flat
        back = [torch.zeros_like(tensor) for tensor in tensors]
        actual = read_some([file], pieces, lambda n: TensorBytes(back[n]))
    assert all(torch.equal(left, other) for left, other in zip(tensors, back, strict=True))
    assert actual == written
    for number, tensor in enumerate(tensors):
        flat = np.frombuffer(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes(), np.uint8)
        expected = [crc64(flat[start : start + BLOCK]) for start in range(0, len(flat), BLOCK)]
        assert block_crcs.assemble_crcs(actual[number], len(flat)) == expected
