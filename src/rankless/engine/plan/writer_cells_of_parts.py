"""The writers of cells, for bytes that lie on ranks as an earlier job left them. Pure functions.

A plan of a save chooses the holder of each byte; here the holders are given. If several ranks have bytes in a cell, one
of them writes it, and the others send it their bytes. The writer is the rank that has the byte at a fraction of the
cell. Each cell has another fraction, so that all ranks write about as many. Cells with bytes of a header belong to its
rank.

:mod:`rankless.save.generation_content` calls :func:`plan_transfers` on every rank in the vote "preparing the drain", if
the run is in an object store. The tables of all parts were sent to all ranks before. The result may depend on the
arguments only: sender and receiver plan apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rankless.engine.plan.cell_transfers import CellTransfer, Numbers, TransferTable
from rankless.engine.plan.writer_cells import CellGrain
from rankless.ondisk.data_files import DataFile

#: Multiples of it, without their whole parts, are spread evenly.
_GOLDEN_RATIO = 0.6180339887498949


class HeldBytes(NamedTuple):
    """Bytes of files that ranks hold, as columns: file, first byte, number of bytes, rank. No two overlap."""

    files: Numbers
    starts: Numbers
    sizes: Numbers
    ranks: Numbers


class CellLayout(NamedTuple):
    """The files, the size of cells in them, and the number of ranks."""

    files: Sequence[DataFile]
    grain: CellGrain
    ranks: int


class CellTransfers(NamedTuple):
    """The bytes that one rank sends and receives. ``needs_exchange``: whether any rank sends bytes."""

    sent: Sequence[CellTransfer]
    received: TransferTable
    needs_exchange: bool


def plan_transfers(held: HeldBytes, layout: CellLayout, rank: int) -> CellTransfers:
    """Return the transfers that ``rank`` sends and receives, so that each cell has one writer."""
    pieces = _cut_at_cells(held, layout.grain.nbytes)
    order = np.lexsort((pieces.starts, pieces.files))
    pieces = HeldBytes(*(column[order] for column in pieces))
    cells = pieces.starts // layout.grain.nbytes
    is_first = np.ones(len(cells), bool)
    is_first[1:] = (np.diff(pieces.files) != 0) | (np.diff(cells) != 0)
    targets = _choose_writers(pieces, cells, np.flatnonzero(is_first), layout)[np.cumsum(is_first) - 1]
    moves, targets = _join_adjacent(pieces, targets, is_first)
    is_moved = moves.ranks != targets
    sent, received = (is_moved & (moves.ranks == rank)), (is_moved & (targets == rank))
    stops = moves.starts + moves.sizes
    rows = zip(*(column[sent].tolist() for column in (moves.files, moves.starts, stops, targets)), strict=True)
    columns = (column[received] for column in (moves.files, moves.starts, stops, moves.ranks))
    table = TransferTable.of_columns(*columns)
    return CellTransfers([CellTransfer(*row) for row in rows], table, bool(is_moved.any()))


def _cut_at_cells(held: HeldBytes, nbytes: int) -> HeldBytes:
    """Cut ranges so that each piece is in one cell."""
    stops = held.starts + held.sizes
    first = held.starts // nbytes
    counts = np.where(held.sizes > 0, (stops - 1) // nbytes - first + 1, 0)
    numbers = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(numbers)) - np.repeat(np.cumsum(counts) - counts, counts)
    edges = (first[numbers] + within) * nbytes
    starts = np.maximum(held.starts[numbers], edges)
    sizes = np.minimum(stops[numbers], edges + nbytes) - starts
    return HeldBytes(held.files[numbers], starts, sizes, held.ranks[numbers])


def _choose_writers(pieces: HeldBytes, cells: Numbers, firsts: Numbers, layout: CellLayout) -> Numbers:
    """Return the rank that writes each cell. ``firsts`` are the numbers of the first pieces of cells."""
    files, grain, ranks = layout
    file_of, cell_of = pieces.files[firsts], cells[firsts]
    headers = np.array([file.data_start for file in files], np.int64)[file_of]
    gaps = zip(file_of.tolist(), cell_of.tolist(), strict=True)
    header_ranks = np.array([grain.gap_rank(*key, ranks) for key in gaps], np.int64)
    lengths = np.diff(np.append(firsts, len(cells)))
    totals = np.add.reduceat(pieces.sizes, firsts) if len(firsts) else np.empty(0, np.int64)
    before = np.cumsum(pieces.sizes) - pieces.sizes
    wanted = before[firsts] + (cell_of * _GOLDEN_RATIO % 1 * totals).astype(np.int64)
    chosen = np.clip(np.searchsorted(before, wanted, side="right") - 1, firsts, firsts + lengths - 1)
    return np.where(cell_of * grain.nbytes < headers, header_ranks, pieces.ranks[chosen])


def _join_adjacent(pieces: HeldBytes, targets: Numbers, is_first: np.ndarray) -> tuple[HeldBytes, Numbers]:
    """Join pieces of a cell that are adjacent and of one rank. ``targets`` are their writers."""
    begins = is_first.copy()
    begins[1:] |= np.diff(pieces.ranks) != 0
    begins[1:] |= pieces.starts[1:] != (pieces.starts + pieces.sizes)[:-1]
    first = np.flatnonzero(begins)
    sizes = np.add.reduceat(pieces.sizes, first) if len(first) else np.empty(0, np.int64)
    return HeldBytes(pieces.files[first], pieces.starts[first], sizes, pieces.ranks[first]), targets[first]
