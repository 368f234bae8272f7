"""One host per cell: no two hosts write into one cell of a file. Pure functions.

A host may write back a whole page of a file, including bytes that it has not written and that another host has changed
meanwhile. So a plan for several hosts divides each file into cells of :data:`CELL_BYTES`, and lets the ranks of one
host write all bytes of a cell. Ranks of other hosts send their bytes in it to a rank of this host.

Most cells contain bytes of one shard only, and need no message. Ranks that hold the same bytes divide them at cell
boundaries. Cells with bytes that belong to no tensor, such as headers, belong to the host of rank 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.engine.plan.file_ranges import FileRange
from holdfast.engine.plan.partition import split_evenly
from holdfast.engine.plan.writer_map import FilePiece, WriterMap

#: The size of a cell in bytes: the largest page size of the platforms that Linux runs on.
CELL_BYTES = 64 * 2**10

#: The ranks, ascending, that hold the same bytes.
Writers = tuple[int, ...]


class CellTransfer(NamedTuple):
    """Bytes ``[start, stop)`` of file number ``file`` that this rank sends to, or receives from, another rank."""

    file: int
    start: int
    stop: int
    rank: int


class _PlacedPiece(NamedTuple):
    """A piece of a cell: rank ``source`` has its bytes, and rank ``target`` writes them."""

    piece: FilePiece
    source: int
    target: int


@dataclass(frozen=True)
class CellPlan:
    """The work of one rank: the file ranges that it has in its memory, and the bytes that it sends and receives.

    Bytes that it sends are among the file ranges; the rank writes all others, and what it receives.
    """

    file_ranges: Sequence[FileRange]
    sent: Sequence[CellTransfer]
    received: Sequence[CellTransfer]


class CellPlanner:
    """Plans which rank writes which bytes of a save from several hosts. ``host_of`` has the host of each rank."""

    def __init__(self, writer_map: WriterMap, host_of: Sequence[int], rank: int) -> None:
        self._map, self._host_of, self._rank = writer_map, host_of, rank
        self._cells: dict[tuple[int, int], list[_PlacedPiece]] = {}

    def plan_rank(
        self, ranges_by_writers: Mapping[Writers, Sequence[FileRange]], stripe_ranges: Sequence[FileRange]
    ) -> CellPlan:
        """Return the plan of this rank.

        ``ranges_by_writers`` are the ranges of its shards, by the ranks that hold the same bytes, and ``stripe_ranges``
        those of the stripes that it assembles.
        """
        own: list[FileRange] = []
        for writers, file_ranges in ranges_by_writers.items():
            own += self._choose_ranges(writers, file_ranges)
        self._choose_ranges((self._rank,), stripe_ranges)  # only to look at their cells
        if self._rank == 0:
            self._place_gaps()
        placed = [(file, placed) for (file, _), row in sorted(self._cells.items()) for placed in row]
        return CellPlan(
            sorted(own, key=_file_position),
            [
                CellTransfer(file, *piece[:2], target)
                for file, (piece, source, target) in placed
                if source == self._rank != target
            ],
            [
                CellTransfer(file, *piece[:2], source)
                for file, (piece, source, target) in placed
                if target == self._rank != source
            ],
        )

    def _choose_ranges(self, writers: Writers, file_ranges: Sequence[FileRange]) -> Iterator[FileRange]:
        """Return the parts of ranges that this rank writes or sends, of those that all ``writers`` hold."""
        ordered = sorted(file_ranges, key=_file_position)
        whole_cells: list[FileRange] = []
        shared: set[tuple[int, int]] = set()
        for run in _merge_runs(ordered):
            start, stop = run.start, run.stop
            if start % CELL_BYTES and self._is_shared(run.file, start // CELL_BYTES, writers):
                shared.add((run.file, start // CELL_BYTES))
                start += CELL_BYTES - start % CELL_BYTES
            if stop % CELL_BYTES and self._is_shared(run.file, stop // CELL_BYTES, writers):
                shared.add((run.file, stop // CELL_BYTES))
                stop -= stop % CELL_BYTES
            if start < stop:
                whole_cells.append(_file_run(run.file, start, stop))
        chosen = [*split_evenly(whole_cells, writers.index(self._rank), len(writers))]
        chosen += (
            _file_run(file, placed.piece.start, placed.piece.stop)
            for file, cell in shared
            for placed in self._cells[file, cell]
            if placed.piece.writers == writers and placed.source == self._rank
        )
        return _clip_ranges(ordered, sorted(chosen, key=_file_position))

    def _is_shared(self, file: int, cell: int, writers: Writers) -> bool:
        """Return whether a cell has bytes of others than ``writers``. If so, its pieces are placed."""
        if (file, cell) in self._cells:
            return True
        pieces = list(self._map.iter_pieces(file, cell * CELL_BYTES, (cell + 1) * CELL_BYTES))
        if all(piece.writers == writers for piece in pieces):
            return False
        self._cells[file, cell] = list(self._place_pieces(file, cell, pieces))
        return True

    def _place_gaps(self) -> None:
        """Place the cells with bytes that belong to no tensor, of which rank 0 may hold nothing else."""
        for file in range(len(self._map.file_sizes)):
            for gap in self._map.iter_gaps(file):
                for edge in gap:
                    if edge % CELL_BYTES:
                        self._is_shared(file, edge // CELL_BYTES, ())

    def _place_pieces(self, file: int, cell: int, pieces: Sequence[FilePiece]) -> Iterator[_PlacedPiece]:
        """Choose the host that writes a cell, and the ranks that have and that write each piece."""
        groups = sorted({piece.writers for piece in pieces if piece.writers})
        hosts, turn = self._candidate_hosts(pieces, groups), file + cell
        host, turn = hosts[turn % len(hosts)], turn // len(hosts)
        local = {writers: [rank for rank in writers if self._host_of[rank] == host] for writers in groups}
        writer_of = {writers: ranks[turn % len(ranks)] for writers, ranks in local.items() if ranks}
        receivers = sorted({*writer_of.values()}) or [0]
        for piece in pieces:
            if piece.writers in writer_of:
                yield _PlacedPiece(piece, writer_of[piece.writers], writer_of[piece.writers])
            elif piece.writers:
                source = piece.writers[turn % len(piece.writers)]
                yield _PlacedPiece(piece, source, receivers[turn % len(receivers)])

    def _candidate_hosts(self, pieces: Sequence[FilePiece], groups: Sequence[Writers]) -> list[int]:
        """Return the hosts that may write a cell: if possible, those that have all of its bytes."""
        if any(not piece.writers for piece in pieces):
            return [self._host_of[0]]
        hosts = [{self._host_of[rank] for rank in writers} for writers in groups]
        return sorted(set.intersection(*hosts) or set.union(*hosts))


def cut_out(
    file_ranges: Sequence[FileRange], sent: Sequence[CellTransfer]
) -> tuple[list[FileRange], list[tuple[CellTransfer, list[FileRange]]]]:
    """Divide ranges into those that the rank writes, and the ranges that make up each transfer.

    Both arguments are in the order of the files. A transfer without any bytes in ``file_ranges`` is left out.
    """
    kept: list[FileRange] = []
    cut: dict[CellTransfer, list[FileRange]] = {}
    number = 0
    for file_range in file_ranges:
        rest = file_range
        while number < len(sent) and (sent[number].file, sent[number].stop) <= (rest.file, rest.offset):
            number += 1
        following = number
        while following < len(sent) and sent[following].file == rest.file:
            transfer = sent[following]
            skip = max(0, transfer.start - rest.offset)
            if skip >= rest.stop - rest.start:
                break
            size = min(transfer.stop - rest.offset, rest.stop - rest.start) - skip
            if skip:
                kept.append(rest.slice_bytes(0, skip))
            cut.setdefault(transfer, []).append(rest.slice_bytes(skip, size))
            rest = rest.slice_bytes(skip + size, rest.stop - rest.start - skip - size)
            following += 1
        if rest.start < rest.stop:
            kept.append(rest)
    return kept, list(cut.items())


def _file_run(file: int, start: int, stop: int) -> FileRange:
    """Return bytes ``[start, stop)`` of a file as a range of no tensor."""
    return FileRange(0, start, stop, 0, file, start)


def _merge_runs(file_ranges: Sequence[FileRange]) -> Iterator[FileRange]:
    """Merge ranges that are adjacent in their file."""
    current: FileRange | None = None
    for file_range in file_ranges:
        start, stop = file_range.offset, file_range.offset + file_range.stop - file_range.start
        if start == stop:
            continue
        if current is not None and (current.file, current.stop) == (file_range.file, start):
            current = _file_run(file_range.file, current.start, stop)
            continue
        if current is not None:
            yield current
        current = _file_run(file_range.file, start, stop)
    if current is not None:
        yield current


def _clip_ranges(file_ranges: Sequence[FileRange], runs: Sequence[FileRange]) -> Iterator[FileRange]:
    """Yield the parts of ranges that are inside of runs. Both are in the order of the files."""
    number = 0
    for file_range in file_ranges:
        stop = file_range.offset + file_range.stop - file_range.start
        while number < len(runs) and (runs[number].file, runs[number].stop) <= (file_range.file, file_range.offset):
            number += 1
        following = number
        while following < len(runs) and (runs[following].file, runs[following].start) < (file_range.file, stop):
            low, high = max(file_range.offset, runs[following].start), min(stop, runs[following].stop)
            if low < high:
                yield file_range.slice_bytes(low - file_range.offset, high - low)
            following += 1


def _file_position(file_range: FileRange) -> tuple[int, int]:
    return file_range.file, file_range.offset
