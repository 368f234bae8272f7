"""Tests the order in which received bytes are written, against one write for each transfer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankless.engine.io import received_messages
from rankless.engine.io.received_messages import ReceivedMessages, ReceivedRun
from rankless.engine.plan.cell_transfers import CellTransfer, tabulate_transfers

_TRAILER = 8


@st.composite
def irregular(draw: st.DrawFn) -> list[CellTransfer]:
    """Transfers in the order of the files, some of them adjacent."""
    rows, file, position = [], 0, 0
    for _ in range(draw(st.integers(0, 20))):
        if draw(st.integers(0, 5)) == 0:
            file, position = file + 1, 0
        position += draw(st.sampled_from([0, 0, 3]))
        size = draw(st.integers(1, 9))
        rows.append(CellTransfer(file, position, position + size, draw(st.integers(1, 4))))
        position += size
    return rows


@st.composite
def regular(draw: st.DrawFn) -> list[CellTransfer]:
    """Small tensors, with equally many bytes of each rank in the order of a mesh; some ranks have no shard of some."""
    mesh = draw(st.permutations(range(1, 31)))
    rows, file, position = [], 0, 0
    for _ in range(draw(st.integers(1, 6))):
        if draw(st.integers(0, 3)) == 0:
            file, position = file + 1, 0
        first = draw(st.sampled_from([0, 0, 5]))
        size = draw(st.integers(1, 9))
        for rank in mesh[first:]:
            rows.append(CellTransfer(file, position, position + size, rank))
            position += size
    return rows


def send(rows: Sequence[CellTransfer]) -> tuple[list[ReceivedRun], dict[tuple[int, int], int], ReceivedMessages]:
    """Return the runs, the bytes that they must have by file and position, and the messages."""
    rng = np.random.default_rng(len(rows))
    received = ReceivedMessages(tabulate_transfers(rows[::-1]), _TRAILER)
    used = dict.fromkeys(received.by_rank, 0)
    expected: dict[tuple[int, int], int] = {}
    for row in rows:
        data = rng.integers(0, 256, row.stop - row.start, np.uint8)
        received.by_rank[row.rank][used[row.rank] :][: len(data)] = data
        used[row.rank] += len(data)
        expected |= {(row.file, row.start + number): byte for number, byte in enumerate(data.tolist())}
    assert {rank: len(message) - _TRAILER for rank, message in received.by_rank.items()} == used
    return list(received.runs()), expected, received


def check_bytes(runs: Sequence[ReceivedRun], expected: dict[tuple[int, int], int]) -> None:
    written = [((run.file, run.start + number), byte) for run in runs for number, byte in enumerate(run.data.tolist())]
    assert [position for position, _ in written] == sorted(expected)
    assert dict(written) == expected


@given(
    st.one_of(irregular(), regular()),
    st.sampled_from([1, 16, 2**20]),
    st.sampled_from([1, 2**20]),
    st.sampled_from([1, 2, 7, 2**16]),
)
def test_received_bytes_are_gathered_into_runs_of_their_files(
    rows: list[CellTransfer], run_bytes: int, min_uncopied: int, chunk_rows: int
) -> None:
    with (
        mock.patch.object(received_messages, "_CHUNK_ROWS", chunk_rows),
        mock.patch.object(received_messages, "_RUN_BYTES", run_bytes),
        mock.patch.object(received_messages, "_MIN_UNCOPIED", min_uncopied),
    ):
        runs, expected, received = send(rows)
    check_bytes(runs, expected)
    if min_uncopied == 1:  # large transfers stay in their messages
        assert len(runs) == len(rows)
        assert all(any(np.shares_memory(run.data, message) for message in received.by_rank.values()) for run in runs)


@given(irregular())
def test_irregular_transfers_that_are_adjacent_become_one_run(rows: list[CellTransfer]) -> None:
    with mock.patch.object(received_messages, "_MIN_SERIES", 2**20):
        runs, expected, _ = send(rows)
    check_bytes(runs, expected)
    adjacent = sum((one.file, one.stop) == (two.file, two.start) for one, two in itertools.pairwise(rows))
    assert len(runs) == len(rows) - adjacent


@pytest.mark.parametrize("is_permuted", [False, True])
def test_a_tensor_with_shards_of_many_ranks_is_one_run(is_permuted: bool) -> None:
    mesh = list(range(1, 1001))
    if is_permuted:
        np.random.default_rng(0).shuffle(mesh)
    rows = [
        CellTransfer(0, 2 * (1000 * tensor + place), 2 * (1000 * tensor + place) + 2, rank)
        for tensor in range(5)
        for place, rank in enumerate(mesh)
    ]
    runs, expected, _ = send(rows)
    check_bytes(runs, expected)
    assert [run.start for run in runs] == [2000 * tensor for tensor in range(5)]
