"""Tests which rank writes which cell, of bytes that ranks hold: against a plan that looks at each byte."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from rankless.engine.plan.writer_cells import CellGrain
from rankless.engine.plan.writer_cells_of_parts import CellLayout, HeldBytes, plan_transfers
from rankless.ondisk.data_files import DataFile, TensorInfo, pack_files

GRAIN = CellGrain(64, is_dealt=True)


def make_files(number: int) -> list[DataFile]:
    infos = {f"t{i}": TensorInfo("U8", (1 + 37 * i % 300,)) for i in range(4 * number)}
    return pack_files("model", infos, {}, 600)


def divide(files: list[DataFile], ranks: int, seed: int) -> Iterator[tuple[int, int, int, int]]:
    """Divide the data of files into ranges, each held by some rank."""
    generator = random.Random(seed)
    for number, file in enumerate(files):
        start = file.data_start
        while start < file.size:
            size = min(file.size - start, generator.randint(1, 150))
            yield number, start, size, generator.randrange(ranks)
            start += size


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(10))
def test_each_cell_has_one_writer_who_gets_all_other_bytes(ranks: int, seed: int) -> None:
    files = make_files(3)
    rows = list(divide(files, ranks, seed))
    random.Random(seed).shuffle(rows)
    held = HeldBytes(*np.array(rows, np.int64).T)
    holder = {(file, byte): rank for file, start, size, rank in rows for byte in range(start, start + size)}
    plans = [plan_transfers(held, CellLayout(files, GRAIN, ranks), rank) for rank in range(ranks)]
    writer = dict(holder)
    received = {}
    for rank, plan in enumerate(plans):
        for transfer in plan.sent:
            for byte in range(transfer.start, transfer.stop):
                assert holder[transfer.file, byte] == rank != transfer.rank
                writer[transfer.file, byte] = transfer.rank
        for transfer in plan.received.to_transfers():
            assert (transfer.file, transfer.start) not in received
            received[transfer.file, transfer.start] = (transfer.stop, transfer.rank, rank)
    sent = {(t.file, t.start): (t.stop, rank, t.rank) for rank, plan in enumerate(plans) for t in plan.sent}
    assert sent == received
    cells: dict[tuple[int, int], set[int]] = {}
    for (file, byte), rank in writer.items():
        cells.setdefault((file, byte // GRAIN.nbytes), set()).add(rank)
    assert all(len(writers) == 1 for writers in cells.values())
    for (file, cell), (rank,) in ((key, tuple(writers)) for key, writers in cells.items()):
        if cell * GRAIN.nbytes < files[file].data_start:
            assert rank == GRAIN.gap_rank(file, cell, ranks)
    assert {plan.needs_exchange for plan in plans} == {bool(sent)}
    for plan in plans:
        assert list(plan.sent) == sorted(plan.sent)


def test_ranks_that_hold_equal_shares_of_each_cell_write_about_as_many() -> None:
    files = pack_files("model", {"t": TensorInfo("U8", (64_000,))}, {}, 10**9)
    file = files[0]
    rows = [(0, start, 16, start // 16 % 4) for start in range(file.data_start, file.size - 16, 16)]
    held = HeldBytes(*np.array(rows, np.int64).T)
    plans = [plan_transfers(held, CellLayout(files, GRAIN, 4), rank) for rank in range(4)]
    counts = [int(plan.received.sizes.sum()) for plan in plans]
    assert max(counts) < 1.2 * min(counts)
