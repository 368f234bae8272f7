"""Tests the order in which received bytes are written, against one write for each transfer."""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rankless.engine.io import cell_exchange
from rankless.engine.plan.cell_transfers import CellTransfer, tabulate_transfers
from rankless.storage.aligned_memory import Bytes


@st.composite
def transfers(draw: st.DrawFn) -> list[CellTransfer]:
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


@given(transfers(), st.sampled_from([1, 16, 2**20]), st.sampled_from([1, 2**20]))
def test_received_bytes_are_gathered_into_runs_of_their_files(
    rows: list[CellTransfer], run_bytes: int, min_uncopied: int
) -> None:
    rng = np.random.default_rng(len(rows))
    expected: dict[tuple[int, int], int] = {}
    parts: dict[int, list[Bytes]] = {}
    for row in rows:
        data = rng.integers(0, 256, row.stop - row.start, np.uint8)
        parts.setdefault(row.rank, []).append(data)
        expected |= {(row.file, row.start + number): byte for number, byte in enumerate(data.tolist())}
    crc = np.zeros(8, np.uint8)
    messages = {rank: np.concatenate([*data, crc]) for rank, data in parts.items()}
    with (
        mock.patch.object(cell_exchange, "_RUN_BYTES", run_bytes),
        mock.patch.object(cell_exchange, "_MIN_UNCOPIED", min_uncopied),
    ):
        runs = list(cell_exchange._gather_runs(tabulate_transfers(rows[::-1]), messages))
    written = [((run.file, run.start + number), byte) for run in runs for number, byte in enumerate(run.data.tolist())]
    assert dict(written) == expected
    assert len(written) == len(expected)
    adjacent = sum(
        (first.file, first.stop) == (second.file, second.start) for first, second in itertools.pairwise(rows)
    )
    if min_uncopied == 1:  # large transfers stay where they are
        assert len(runs) == len(rows)
        assert all(any(np.shares_memory(run.data, message) for message in messages.values()) for run in runs)
    elif run_bytes == 2**20:
        assert len(runs) == len(rows) - adjacent
