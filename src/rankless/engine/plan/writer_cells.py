"""One host per cell: no two hosts write into one cell of a file. Pure functions.

A host may write back a whole page of a file, including bytes that it has not written and that another host has changed
meanwhile. So a plan for several hosts divides each file into cells of :data:`CELL_BYTES`, and lets the ranks of one
host write all bytes of a cell. Ranks of other hosts send their bytes in it to a rank of this host.

Most cells contain bytes of one shard only, and need no message. Ranks that hold the same bytes divide them at cell
boundaries. Cells with bytes that belong to no tensor, such as headers, belong to the host of rank 0, or to each rank in
turn.

:mod:`rankless.engine.plan.save_plan` and :mod:`rankless.conversion.pipeline` call :class:`CellPlanner` on every rank
for itself. Each byte must have one writer, and sender and receiver must agree, without a message: the choice may depend
on the arguments only.

A cell of several shards is written by a host that has all of its bytes, or else by the hosts in turn. Of replicas, the
rank that writes the neighbouring cells writes or sends. Under FSDP2 that is at most one cell at each edge of a shard.

A *crowded* cell has more than :data:`MAX_GROUPS` sets of ranks. The first holder of the first tensor that begins in it
receives it, mostly rank 0: so each rank sends to few others, and only the receiver plans all pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from rankless.engine.plan.cell_transfers import CellTransfer, TransferTable, tabulate_transfers
from rankless.engine.plan.equal_shares import split_evenly
from rankless.engine.plan.file_ranges import FileRange
from rankless.engine.plan.file_writers import FilePiece, WriterMap
from rankless.engine.plan.tensor_writers import Writers, choose_share

#: The size of a cell in bytes: the largest page size of the platforms that Linux runs on.
CELL_BYTES = 64 * 2**10

#: The most groups of ranks in a cell with bytes that are placed one by one; a cell with more groups is crowded.
MAX_GROUPS = 32


#: Multiples of it, without their whole parts, are spread evenly. The ranks at one fraction of each cell write the cells
#: of one tensor, the ranks at another fraction the cells of the next tensor: so all ranks write as many.
_GOLDEN_RATIO = 0.6180339887498949


class _PlacedPiece(NamedTuple):
    """A piece of a cell: rank ``source`` has its bytes, and rank ``target`` writes them."""

    piece: FilePiece
    source: int
    target: int


class _PlacedCell(NamedTuple):
    """The pieces of a cell, by their first bytes; of a crowded cell, which has a ``receiver``, only this rank's."""

    pieces: dict[int, _PlacedPiece]
    receiver: int | None = None

    def add_piece(self, placed: _PlacedPiece) -> None:
        """Add a piece."""
        self.pieces[placed.piece.start] = placed


class CellPlan(msgspec.Struct, frozen=True):
    """The work of one rank: the file ranges that it has in its memory, and the bytes that it sends and receives.

    Bytes that it sends are among the file ranges; the rank writes all others, and the bytes that it receives.
    """

    file_ranges: Sequence[FileRange]
    sent: Sequence[CellTransfer]
    received: TransferTable


class CellGrain(msgspec.Struct, frozen=True):
    """The size of cells in bytes, and whether cells with bytes of several ranks are dealt out to all ranks.

    If they are, each rank writes about as many bytes, and sends to many others. If not, rank 0 writes the bytes that
    belong to no tensor, and a rank sends to as few others as possible.
    """

    nbytes: int
    is_dealt: bool = False

    def gap_rank(self, file: int, cell: int, ranks: int) -> int:
        """Return the rank that writes a cell with bytes that belong to no tensor."""
        return (file + cell) % ranks if self.is_dealt else 0


class CellPlanner:
    """Plans which rank writes which bytes of a save from several hosts. ``host_of`` has the host of each rank.

    The parts of uploads to an object store are cells, too: each of ``grain.nbytes``, with one rank that writes it.
    """

    def __init__(
        self, writer_map: WriterMap, host_of: Sequence[int], rank: int, grain: CellGrain | None = None
    ) -> None:
        self._map, self._host_of, self._rank = writer_map, host_of, rank
        self._grain = grain or CellGrain(CELL_BYTES)
        self._cell_bytes = self._grain.nbytes
        self._cells: dict[tuple[int, int], _PlacedCell] = {}
        self._hosts_of: dict[Writers, dict[int, list[int]]] = {}
        #: Whether there are writers with each number, and all of them are on other hosts.
        self._is_remote = np.empty(0, bool)

    def plan_rank(
        self, ranges_by_writers: Mapping[Writers, Sequence[FileRange]], stripe_ranges: Sequence[FileRange]
    ) -> CellPlan:
        """Return the plan of this rank.

        ``ranges_by_writers`` has the ranges of its shards, by the ranks that hold the same bytes. ``stripe_ranges`` has
        the ranges of the stripes that it assembles.
        """
        own: list[FileRange] = []
        for writers, file_ranges in ranges_by_writers.items():
            own += self._choose_ranges(writers, file_ranges)
        self._choose_ranges((self._rank,), stripe_ranges)  # only to look at their cells
        self._place_gaps()
        placed = [
            (file, placed)
            for (file, _), cell in sorted(self._cells.items())
            for _, placed in sorted(cell.pieces.items())
        ]
        return CellPlan(
            sorted(own, key=_file_position),
            [
                CellTransfer(file, *piece[:2], target)
                for file, (piece, source, target) in placed
                if source == self._rank != target
            ],
            tabulate_transfers(
                [
                    CellTransfer(file, *piece[:2], source)
                    for file, (piece, source, target) in placed
                    if target == self._rank != source
                ],
                (self._receive_crowded(*key) for key, cell in self._cells.items() if cell.receiver == self._rank),
            ),
        )

    def _choose_ranges(self, writers: Writers, file_ranges: Sequence[FileRange]) -> Iterator[FileRange]:
        """Return the parts of ranges that this rank writes or sends, of those that all ``writers`` hold."""
        ordered = sorted(file_ranges, key=_file_position)
        whole_cells: list[FileRange] = []
        shared: set[tuple[int, int]] = set()
        for run in _merge_runs(ordered):
            start, stop = run.start, run.stop
            if start % self._cell_bytes and self._is_shared(run, start // self._cell_bytes, writers):
                shared.add((run.file, start // self._cell_bytes))
                start += self._cell_bytes - start % self._cell_bytes
            if stop % self._cell_bytes and self._is_shared(run, stop // self._cell_bytes, writers):
                shared.add((run.file, stop // self._cell_bytes))
                stop -= stop % self._cell_bytes
            if start < stop:
                whole_cells.append(_file_run(run.file, start, stop))
        chosen = [*split_evenly(whole_cells, writers.index(self._rank), len(writers), self._cell_bytes)]
        chosen += (
            _file_run(file, placed.piece.start, placed.piece.stop)
            for file, cell in shared
            for placed in self._cells[file, cell].pieces.values()
            if placed.piece.writers == writers and placed.source == self._rank
        )
        return _clip_ranges(ordered, sorted(chosen, key=_file_position))

    def _is_shared(self, run: FileRange, cell: int, writers: Writers) -> bool:
        """Return whether a cell has bytes of others than ``writers``, who hold a run. If so, its pieces are placed."""
        key, start = (run.file, cell), cell * self._cell_bytes
        if key not in self._cells:
            pieces = self._find_pieces(run.file, start)
            if pieces is not None and all(piece.writers == writers for piece in pieces):
                return False
            if pieces is None:
                self._cells[key] = _PlacedCell({}, self._choose_receiver(*key))
            else:
                self._cells[key] = self._place_cell(*key, pieces)
        placed = self._cells[key]
        if placed.receiver is not None and writers:
            piece = FilePiece(max(start, run.start), min(start + self._cell_bytes, run.stop), writers)
            placed.add_piece(self._place_in_crowded(run.file, piece, placed.receiver))
        return True

    def _find_pieces(self, file: int, start: int) -> list[FilePiece] | None:
        """Return the pieces of the cell at byte ``start``; ``None`` if the cell is crowded."""
        pieces, groups = list[FilePiece](), set[Writers]()
        for piece in self._map.iter_pieces(file, start, start + self._cell_bytes):
            pieces.append(piece)
            groups.add(piece.writers)
            if len(groups) > MAX_GROUPS:
                return None
        return pieces

    def _place_gaps(self) -> None:
        """Place the cells with bytes that belong to no tensor: their writer may hold nothing else of them."""
        for file in range(len(self._map.file_sizes)):
            for gap in self._map.iter_gaps(file):
                for edge in gap:
                    cell = edge // self._cell_bytes
                    if edge % self._cell_bytes and self._gap_rank(file, cell) == self._rank:
                        self._is_shared(_file_run(file, edge, edge), cell, ())

    def _gap_rank(self, file: int, cell: int) -> int:
        return self._grain.gap_rank(file, cell, len(self._host_of))

    def _place_cell(self, file: int, cell: int, pieces: Sequence[FilePiece]) -> _PlacedCell:
        """Choose the host that writes a cell, and the ranks that have and that write each piece."""
        shares = {
            piece.writers: self._share_at(file, piece.start, piece.writers)
            for piece in reversed(pieces)
            if piece.writers
        }
        host = self._choose_host(file, cell, pieces, shares)
        writer_of = {
            writers: min(local, key=lambda rank: abs(rank - share))
            for writers, share in shares.items()
            if (local := self._ranks_on(host, writers))
        }
        receivers = sorted({*writer_of.values()}) or [self._gap_rank(file, cell)]
        placed = _PlacedCell({})
        for piece in pieces:
            if piece.writers in writer_of:
                placed.add_piece(_PlacedPiece(piece, writer_of[piece.writers], writer_of[piece.writers]))
            elif piece.writers:
                receiver = receivers[(file + cell) // len(shares) % len(receivers)]
                placed.add_piece(_PlacedPiece(piece, shares[piece.writers], receiver))
        return placed

    def _choose_host(self, file: int, cell: int, pieces: Sequence[FilePiece], shares: Mapping[Writers, int]) -> int:
        """Return the host that writes a cell: if possible, one that has all of its bytes.

        ``shares`` has, for each group of writers, the rank that writes its bytes in the neighbouring cells.
        """
        if any(not piece.writers for piece in pieces):
            return self._host_of[self._gap_rank(file, cell)]
        leading = sorted(shares)[(file + cell) % len(shares)]
        if self._grain.is_dealt:
            dealt = self._dealt_position(file, cell)
            leading = next(piece.writers for piece in pieces if piece.start <= dealt < piece.stop)
        host = self._host_of[shares[leading]]
        if all(host in self._ranks_by_host(writers) for writers in shares):
            return host
        hosts = set.intersection(*({*self._ranks_by_host(writers)} for writers in shares))
        if not hosts:
            return host
        ranks = (rank for host in hosts for rank in self._ranks_on(host, leading))
        return self._host_of[min(ranks, key=lambda rank: (abs(rank - shares[leading]), rank))]

    def _dealt_position(self, file: int, cell: int) -> int:
        """Return the byte of a cell that decides: its writer gets the whole cell."""
        start, stop = cell * self._cell_bytes, min((cell + 1) * self._cell_bytes, self._map.file_sizes[file])
        fraction = self._map.tensor_number(file, start) * _GOLDEN_RATIO % 1
        return start + int(fraction * (stop - start))

    def _choose_receiver(self, file: int, cell: int) -> int:
        """Choose the rank that receives the pieces of a cell with very many writers.

        Unless cells are dealt, it is the same one for as many cells as possible, so that a rank sends to few others.
        """
        start, stop = cell * self._cell_bytes, min((cell + 1) * self._cell_bytes, self._map.file_sizes[file])
        if self._map.has_gap(file, start, stop):
            return self._gap_rank(file, cell)
        if self._grain.is_dealt:
            dealt = self._dealt_position(file, cell)
            return self._share_at(file, dealt, next(self._map.iter_pieces(file, dealt, dealt + 1)).writers)
        first = self._map.first_tensor_start(file, start, stop)
        return next(self._map.iter_pieces(file, first, first + 1)).writers[0]

    def _receive_crowded(self, file: int, cell: int) -> TransferTable:
        """Return the pieces that this rank receives in a crowded cell: tens of thousands, in the worst case."""
        start, host = cell * self._cell_bytes, self._host_of[self._rank]
        starts, stops, numbers = self._map.tabulate_pieces(file, start, start + self._cell_bytes)
        unknown = self._map.numbers.writers[len(self._is_remote) :]
        if unknown:
            found = [bool(writers) and not self._ranks_on(host, writers) for writers in unknown]
            self._is_remote = np.concatenate([self._is_remote, found])
        is_remote = self._is_remote[numbers]
        starts, stops, numbers = starts[is_remote], stops[is_remote], numbers[is_remote]
        ranks = self._map.numbers.choose_shares(numbers, lambda: self._map.fractions_before(file, starts))
        return TransferTable.of_columns(np.full_like(starts, file), starts, stops, ranks)

    def _place_in_crowded(self, file: int, piece: FilePiece, receiver: int) -> _PlacedPiece:
        share = self._share_at(file, piece.start, piece.writers)
        local = self._ranks_on(self._host_of[receiver], piece.writers)
        if not local:
            return _PlacedPiece(piece, share, receiver)
        writer = min(local, key=lambda rank: abs(rank - share))
        return _PlacedPiece(piece, writer, writer)

    def _share_at(self, file: int, position: int, writers: Writers) -> int:
        """Return the one of ``writers`` that writes their bytes near a position, if the shares are equal everywhere."""
        if len(writers) == 1:
            return writers[0]
        return choose_share(writers, self._map.fraction_before(file, position))

    def _ranks_on(self, host: int, writers: Writers) -> Sequence[int]:
        return self._ranks_by_host(writers).get(host, ())

    def _ranks_by_host(self, writers: Writers) -> Mapping[int, Sequence[int]]:
        """Return the ranks, ascending, of a group on each of its hosts."""
        by_host = self._hosts_of.get(writers)
        if by_host is None:
            by_host = self._hosts_of[writers] = {}
            for rank in writers:
                by_host.setdefault(self._host_of[rank], []).append(rank)
        return by_host


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
