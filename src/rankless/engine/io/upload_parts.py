"""Upload of files to an object store: each file is one multipart upload, and each part is sent by one rank.

A part has bytes of several ranks if shards are small. The plan says who sends it; the others pass their bytes on. Ranks
do this in rounds of a few parts each, so that a rank needs memory for some parts only, whatever the size of the files.

Some bytes of a file belong to no tensor, such as the records of a zip file. All ranks know them, and take turns in
sending the parts with such bytes. The header of a file is known when all ranks have hashed their bytes. So the sender
of a part with bytes of a header keeps it until then: small ranges and received bytes in memory of its own, all others
where they are. A file of one part is kept in the same way, because it is visible as soon as it is sent.

:mod:`rankless.save.shared_upload` runs :meth:`PartUploader.upload` on every rank in the vote "writing", and
:meth:`UploadedParts.send_held` in the vote "completing the files". All ranks must go through the same rounds. The size
of parts decides the ETags of objects.

Parts are cells of :mod:`rankless.engine.plan.writer_cells`, with each rank as a host. They are dealt to ranks that are
spread evenly, a few parts a rank in each round. Bytes that are not contiguous on the CPU are copied, and so are small
ranges; all else is sent from the memory of the tensors.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rankless.engine.comm.store_messages import StoreMessages
from rankless.engine.io.cell_exchange import CellExchange
from rankless.engine.io.part_assembly import PartAssembly
from rankless.engine.io.received_messages import ReceivedRun
from rankless.engine.io.requests import (
    Fragments,
    OnBytesMoved,
    ProviderOf,
    hash_fragments,
    ignore_progress,
    merge_fragments,
)
from rankless.engine.io.upload_target import PART_BYTES, UploadTarget
from rankless.engine.plan.cell_transfers import TransferTable, cut_out
from rankless.engine.plan.file_ranges import FileRange, count_bytes
from rankless.engine.plan.save_plan import SavePlan
from rankless.engine.plan.writer_cells import CellGrain
from rankless.ondisk.block_crcs import Fragment
from rankless.process.prepared_types import prepared
from rankless.process.worker_threads import run_in_threads
from rankless.storage.aligned_memory import Bytes, aligned_buffer

if TYPE_CHECKING:
    from rankless.engine.io.p2p import P2PExchange

#: The cells of a plan for uploads: each is a part. Ranks take turns in sending the headers, which they keep in memory.
GRAIN = CellGrain(PART_BYTES, is_dealt=True)

#: The most bytes of a message between ranks that goes through the key-value store. Nearly all bytes of a large job are
#: passed on, in messages of some 100 KiB, and they must not all go through one process.
_MAX_STORED_BYTES = 4 * 2**10

#: How many parts a rank sends in a round, and how many at a time.
_PARTS_A_ROUND, _THREADS = 8, 8


@prepared
class SentPart(NamedTuple):
    """A part that was sent: of file ``file``, counted from 0, with its CRC-64/NVME, and the receipt of the store."""

    file: int
    part: int
    crc64nvme: int
    receipt: str


@dataclass
class UploadedParts:
    """The result of one rank's uploads: its fragments, the parts that it has sent, and those that wait for a header."""

    fragments: Fragments = field(default_factory=dict)
    sent: list[SentPart] = field(default_factory=list)
    held: dict[tuple[int, int], PartAssembly] = field(default_factory=dict)

    def send_held(self, targets: Sequence[UploadTarget], headers: Sequence[bytes]) -> list[SentPart]:
        """Complete the parts that were kept with the headers, by file, and send them."""

        def send(key: tuple[int, int]) -> SentPart:
            (file, part), assembly = key, self.held.pop(key)
            assembly.add_known(part * PART_BYTES, headers[file][part * PART_BYTES : (part + 1) * PART_BYTES])
            return _send_assembled(targets[file], file, part, assembly)

        return run_in_threads(send, sorted(self.held), _THREADS)


def _send_assembled(target: UploadTarget, file: int, part: int, assembly: PartAssembly) -> SentPart:
    """Send a part of the file with number ``file``."""
    assembly.check_complete()
    body = assembly.make_body()
    return SentPart(file, part, body.crc64nvme, target.send_part(part, body))


class _Position(NamedTuple):
    """A byte of a file. Positions are in the order of the files."""

    file: int
    offset: int


class _Round(NamedTuple):
    """Whole parts of one file or several: from a position to another one, which is not in it."""

    start: _Position
    stop: _Position

    def bytes_of(self, file: int, size: int) -> tuple[int, int]:
        """Return the first byte of a file that is in the round, and the byte after the last one."""
        start = self.start.offset if file == self.start.file else 0
        return start, min(size, self.stop.offset) if file == self.stop.file else size


@dataclass(frozen=True)
class _Part:
    """A part that this rank sends: bytes in the rank's memory, bytes of other ranks, and bytes of no tensor."""

    file: int
    number: int
    file_ranges: list[FileRange] = field(default_factory=list)
    runs: list[ReceivedRun] = field(default_factory=list)
    known: list[tuple[int, bytes]] = field(default_factory=list)


class PartUploader:
    """Uploads the share of one rank. ``file_ranges`` are the bytes that it has in memory, in the order of the files."""

    def __init__(
        self,
        plan: SavePlan,
        targets: Sequence[UploadTarget],
        rank: int,
        file_ranges: Sequence[FileRange],
        bytes_of: ProviderOf,
    ) -> None:
        self._plan, self._targets, self._bytes_of = plan, targets, bytes_of
        self._rank, self._ranges = rank, file_ranges
        self._starts = [_Position(file_range.file, file_range.offset) for file_range in file_ranges]
        self._sent_starts = [_Position(transfer.file, transfer.start) for transfer in plan.sent]
        self._known: Mapping[tuple[int, int], list[tuple[int, bytes]]] = {}
        self._free_buffers: list[Bytes] = []
        self._on_moved: OnBytesMoved = ignore_progress

    def upload(
        self, p2p: P2PExchange | None, stored: StoreMessages, ranks: int, on_moved: OnBytesMoved
    ) -> UploadedParts:
        """Send all parts of this rank. All ranks call this; with one rank there is no ``p2p``.

        ``on_moved`` counts the bytes of tensors that the rank sends to the store or to another rank.
        """
        self._on_moved = on_moved
        uploaded = UploadedParts()
        hashed: list[list[tuple[int, Fragment]]] = []
        self._known = self._choose_known(ranks)
        for number, upload_round in enumerate(_plan_rounds(self._targets, ranks)):
            kept, runs = self._exchange_round(number, upload_round, p2p, stored, hashed)
            parts = _group_parts(kept, runs, self._known_in(upload_round))
            hashed += run_in_threads(lambda part: self._send_part(part, uploaded), parts, _THREADS)
        uploaded.fragments = merge_fragments(hashed)
        return uploaded

    def _choose_known(self, ranks: int) -> dict[tuple[int, int], list[tuple[int, bytes]]]:
        """Return the bytes of no tensor that this rank sends, by the file and the part; none yet of headers."""
        chosen: dict[tuple[int, int], list[tuple[int, bytes]]] = {}
        for file, target in enumerate(self._targets):
            header = ((part * PART_BYTES, b"") for part in range(-(-target.frame.header_bytes // PART_BYTES)))
            for offset, data in chain(header, *map(_cut_at_parts, target.frame.known)):
                part = offset // PART_BYTES
                if GRAIN.gap_rank(file, part, ranks) == self._rank:
                    chosen.setdefault((file, part), []).append((offset, data))
        return dict(sorted(chosen.items()))

    def _known_in(self, upload_round: _Round) -> Mapping[tuple[int, int], list[tuple[int, bytes]]]:
        """Return the bytes of no tensor that this rank sends in a round, by the file and the part."""
        keys = list(self._known)
        first, stop = (bisect_left(keys, (edge.file, -(-edge.offset // PART_BYTES))) for edge in upload_round)
        return {key: self._known[key] for key in keys[first:stop]}

    def _exchange_round(
        self,
        number: int,
        upload_round: _Round,
        p2p: P2PExchange | None,
        stored: StoreMessages,
        hashed: list[list[tuple[int, Fragment]]],
    ) -> tuple[Sequence[FileRange], list[ReceivedRun]]:
        """Pass bytes on. Return the ranges that this rank sends to the store from memory, and the received bytes."""
        own = self._ranges_in(upload_round)
        low, high = (bisect_left(self._sent_starts, edge) for edge in upload_round)
        sent, received = self._plan.sent[low:high], _select_transfers(self._plan.received, upload_round)
        if p2p is None or not (sent or len(received.ranks)):
            return own, []
        cells = CellExchange(sent, received, p2p, stored.for_round(number), _MAX_STORED_BYTES)
        kept, cut = cut_out(own, sent)
        for transfer, sent_ranges in cut:
            for file_range in sent_ranges:
                data = cells.pack_range(transfer, file_range, self._bytes_of(file_range.tensor))
                hashed.append(list(hash_fragments(file_range, data)))
                self._on_moved(file_range.stop - file_range.start)
        cells.start()
        return kept, list(cells.receive_runs())

    def _ranges_in(self, upload_round: _Round) -> list[FileRange]:
        """Return the parts of the rank's ranges that are inside of a round."""
        first, stop = (bisect_left(self._starts, edge) for edge in upload_round)
        clipped = []
        for file_range in self._ranges[max(0, first - 1) : stop]:
            end = file_range.offset + file_range.stop - file_range.start
            start, end_of_round = upload_round.bytes_of(file_range.file, end)
            low, high = max(file_range.offset, start), min(end, end_of_round)
            if file_range.file >= upload_round.start.file and low < high:
                clipped.append(file_range.slice_bytes(low - file_range.offset, high - low))
        return clipped

    def _send_part(self, part: _Part, uploaded: UploadedParts) -> list[tuple[int, Fragment]]:
        target, start = self._targets[part.file], part.number * PART_BYTES
        size = min(PART_BYTES, target.size - start)
        if target.is_held(start):
            held = PartAssembly(start, np.empty(size, np.uint8))
            fragments = self._fill_part(part, held)
            uploaded.held[part.file, part.number] = held
        else:
            with self._borrow_buffer() as buffer:
                assembly = PartAssembly(start, buffer[:size])
                fragments = self._fill_part(part, assembly)
                sent = _send_assembled(target, part.file, part.number, assembly)
            uploaded.sent.append(sent)
        self._on_moved(count_bytes(part.file_ranges))
        return fragments

    def _fill_part(self, part: _Part, assembly: PartAssembly) -> list[tuple[int, Fragment]]:
        for run in part.runs:
            assembly.add_run(run)
        for offset, data in part.known:
            assembly.add_known(offset, data)
        return [
            fragment
            for file_range in part.file_ranges
            for fragment in assembly.add_range(file_range, self._bytes_of(file_range.tensor))
        ]

    @contextmanager
    def _borrow_buffer(self) -> Iterator[Bytes]:
        """Yield a buffer of one part. Later parts use it again: new memory would cost as much time as the copies."""
        try:
            buffer = self._free_buffers.pop()
        except IndexError:
            buffer = aligned_buffer(PART_BYTES)
        try:
            yield buffer
        finally:
            self._free_buffers.append(buffer)


def _cut_at_parts(piece: tuple[int, bytes]) -> Iterator[tuple[int, bytes]]:
    """Cut known bytes so that each piece is in one part."""
    offset, data = piece
    start = 0
    while start < len(data):
        size = PART_BYTES - (offset + start) % PART_BYTES
        yield offset + start, data[start : start + size]
        start += size


def _plan_rounds(targets: Sequence[UploadTarget], ranks: int) -> Iterator[_Round]:
    """Yield rounds that cover all files: the same ones on all ranks."""
    limit, parts, start = _PARTS_A_ROUND * ranks, 0, _Position(0, 0)
    for number, target in enumerate(targets):
        for offset in range(0, target.size, PART_BYTES):
            if parts == limit:
                position = _Position(number, offset)
                yield _Round(start, position)
                start, parts = position, 0
            parts += 1
    yield _Round(start, _Position(len(targets), 0))


def _select_transfers(received: TransferTable, upload_round: _Round) -> TransferTable:
    low, high = (
        (received.files > edge.file) | ((received.files == edge.file) & (received.starts >= edge.offset))
        for edge in upload_round
    )
    return received.select_rows(low & ~high)


def _group_parts(
    file_ranges: Sequence[FileRange],
    runs: Sequence[ReceivedRun],
    known: Mapping[tuple[int, int], list[tuple[int, bytes]]],
) -> list[_Part]:
    """Return the parts of a round that this rank sends: parts with bytes of its own, or bytes of no tensor."""
    parts = {key: _Part(*key, known=pieces) for key, pieces in known.items()}

    def part_at(file: int, offset: int) -> _Part:
        key = file, offset // PART_BYTES
        return parts.setdefault(key, _Part(*key))

    for file_range in file_ranges:
        rest = file_range
        while rest.start < rest.stop:
            size = min(rest.stop - rest.start, PART_BYTES - rest.offset % PART_BYTES)
            part_at(rest.file, rest.offset).file_ranges.append(rest.slice_bytes(0, size))
            rest = rest.slice_bytes(size, rest.stop - rest.start - size)
    for run in runs:
        done = 0
        while done < len(run.data):
            offset = run.start + done
            size = min(len(run.data) - done, PART_BYTES - offset % PART_BYTES)
            part_at(run.file, offset).runs.append(ReceivedRun(run.file, offset, run.data[done : done + size]))
            done += size
    return [parts[key] for key in sorted(parts)]
