"""Exchange of the bytes in cells that another host writes: see :mod:`rankless.engine.plan.writer_cells`.

Each pair of ranks exchanges at most one message, which ends with a CRC: the network must not change bytes unnoticed.
Small messages go through the key-value store. So a rank is connected to few others, even if thousands send it some
bytes each.

:mod:`rankless.save.shard_writer` has one in a save from several hosts, and :mod:`rankless.engine.io.upload_parts` one
in each round of an upload: on every rank, in the thread that writes, inside the vote "writing". All ranks must call
:meth:`~CellExchange.start`, also without own bytes, before they wait for the bytes of others.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rankless.engine.comm.store_messages import StoreMessages
from rankless.engine.io.requests import ByteProvider
from rankless.engine.plan.cell_transfers import CellTransfer, Numbers, SmallNumbers, TransferTable, tabulate_transfers
from rankless.engine.plan.file_ranges import FileRange
from rankless.errors import RankFailedError
from rankless.ondisk.block_crcs import crc64
from rankless.storage.aligned_memory import Bytes
from rankless.storage.direct_io import BufferedWriter

if TYPE_CHECKING:
    from rankless.engine.io.p2p import P2PExchange, SentBytes

_CRC = struct.Struct("<Q")

#: About the most bytes of small transfers that are written with one call: the indices to gather them need 16 times as
#: much memory.
_RUN_BYTES = 2**20

#: Transfers of this many bytes on average are written one by one, from the messages that brought them.
_MIN_UNCOPIED = 64 * 2**10

#: The most bytes of a message that goes through the key-value store, unless the caller says otherwise.
MAX_STORED_BYTES = 128 * 2**10


class CellExchange:
    """The bytes that one rank sends to other ranks, and those that it receives and writes, in one save.

    Messages of at most ``max_stored_bytes`` go through the key-value store (by default :data:`MAX_STORED_BYTES`).
    """

    def __init__(
        self,
        sent: Sequence[CellTransfer],
        received: TransferTable,
        p2p: P2PExchange,
        stored: StoreMessages,
        max_stored_bytes: int | None = None,
    ) -> None:
        self._max_stored_bytes = MAX_STORED_BYTES if max_stored_bytes is None else max_stored_bytes
        self.sent, self.p2p, self._stored, self._received = sent, p2p, stored, received
        self._works: list[SentBytes] = []
        self._outgoing = dict(_allocate_messages(tabulate_transfers(sent)))
        self._incoming = dict(_allocate_messages(received))
        self._sent_slices = dict(_slice_messages(sent, self._outgoing))

    def pack_range(self, transfer: CellTransfer, file_range: FileRange, provider: ByteProvider) -> Bytes:
        """Copy a part of a transfer out of a tensor into the message, and return the copy."""
        packed = self._slice_of(transfer, file_range)
        provider.copy_out(file_range.local, packed)
        return packed

    def pack_bytes(self, transfer: CellTransfer, file_range: FileRange, data: Bytes) -> None:
        """Copy a part of a transfer into the message."""
        np.copyto(self._slice_of(transfer, file_range), data)

    def _slice_of(self, transfer: CellTransfer, file_range: FileRange) -> Bytes:
        start = file_range.offset - transfer.start
        return self._sent_slices[transfer][start : start + file_range.stop - file_range.start]

    def start(self) -> None:
        """Start to send and to receive. All transfers must be packed."""
        self._works += (
            self.p2p.receive(message, rank) for rank, message in self._incoming.items() if not self._is_stored(message)
        )
        for rank, message in self._outgoing.items():
            message[-_CRC.size :] = np.frombuffer(_CRC.pack(crc64(message[: -_CRC.size])), np.uint8)
            if self._is_stored(message):
                self._stored.send(message.tobytes(), rank)
            else:
                self._works.append(self.p2p.send(message, rank))

    def finish(self, files: Sequence[Path]) -> None:
        """Wait for all messages, then write the received bytes and make them durable. Errors: :meth:`receive_runs`."""
        for number, runs in itertools.groupby(self.receive_runs(), key=lambda run: run.file):
            with BufferedWriter(files[number]) as writer:
                for run in runs:
                    writer.write(run.start, run.data.data)
                writer.sync()

    def receive_runs(self) -> Iterator[ReceivedRun]:
        """Wait for all messages, and yield the received bytes in the order of the files.

        Raises ``RankFailedError`` if a message does not match its CRC.
        """
        self._receive_stored()
        self.p2p.wait(self._works)
        for rank, message in self._incoming.items():
            if _CRC.unpack(message[-_CRC.size :].tobytes()) != (crc64(message[: -_CRC.size]),):
                raise RankFailedError(f"bytes that rank {rank} sent were changed on their way: save again")
        yield from _gather_runs(self._received, self._incoming)

    def _receive_stored(self) -> None:
        senders = [rank for rank, message in self._incoming.items() if self._is_stored(message)]
        for rank, raw in self._stored.receive(senders):
            message = self._incoming[rank]
            if len(raw) != len(message):
                raise RankFailedError(f"rank {rank} sent {len(raw)} bytes instead of {len(message)}: save again")
            message[:] = np.frombuffer(raw, np.uint8)

    def _is_stored(self, message: Bytes) -> bool:
        """Return whether a message goes through the key-value store."""
        return len(message) <= self._max_stored_bytes


class ReceivedRun(NamedTuple):
    """Received bytes that are adjacent in a file."""

    file: int
    start: int
    data: Bytes


def _gather_runs(received: TransferTable, messages: Mapping[int, Bytes]) -> Iterator[ReceivedRun]:
    """Yield the bytes of messages in the order of the files: few large runs, even if there are many small transfers."""
    if not len(received.ranks):
        return
    sizes = received.sizes
    by_rank = _order_by_rank(received.ranks)
    places = np.empty_like(sizes)
    places[by_rank] = np.cumsum(sizes[by_rank]) - sizes[by_rank]
    if sizes.mean() >= _MIN_UNCOPIED:
        yield from _slice_received(received, places, messages)
        return
    data = np.concatenate([messages[rank][: -_CRC.size] for rank in sorted(messages)])
    is_first = (received.files[1:] != received.files[:-1]) | (received.starts[1:] != received.stops[:-1])
    is_first |= np.diff(np.cumsum(sizes) // _RUN_BYTES) > 0
    edges = [0, *(np.flatnonzero(is_first) + 1).tolist(), len(sizes)]
    for first, stop in itertools.pairwise(edges):
        yield ReceivedRun(
            int(received.files[first]),
            int(received.starts[first]),
            _gather_slices(data, places[first:stop], sizes[first:stop]),
        )


def _order_by_rank(ranks: SmallNumbers) -> Numbers:
    """Return the order of transfers by rank; a rank's own keep their order. Numbers of 16 bits are sorted fastest."""
    order: Numbers = np.argsort(ranks.astype(np.uint16), kind="stable")
    if ranks.max() < 2**16:
        return order
    upper = (ranks[order] >> 16).astype(np.uint16)
    return order[np.argsort(upper, kind="stable")]


def _slice_received(received: TransferTable, places: Numbers, messages: Mapping[int, Bytes]) -> Iterator[ReceivedRun]:
    """Yield each transfer as a part of its message. ``places`` are those in all messages, one after another by rank."""
    start_of, start = dict[int, int](), 0
    for rank in sorted(messages):
        start_of[rank] = start
        start += len(messages[rank]) - _CRC.size
    columns = (column.tolist() for column in (received.files, received.starts, received.ranks, received.sizes, places))
    for file, offset, rank, size, place in zip(*columns, strict=True):
        yield ReceivedRun(file, offset, messages[rank][place - start_of[rank] :][:size])


def _gather_slices(data: Bytes, starts: Numbers, sizes: Numbers) -> Bytes:
    """Return slices of ``data`` one after another."""
    if len(starts) == 1:
        return data[starts[0] : starts[0] + sizes[0]]
    stops = np.cumsum(sizes)
    gathered: Bytes = data[np.repeat(starts - (stops - sizes), sizes) + np.arange(stops[-1])]
    return gathered


def _allocate_messages(transfers: TransferTable) -> Iterator[tuple[int, Bytes]]:
    """Yield a buffer for the bytes that are exchanged with each rank, and their CRC."""
    sizes = np.bincount(transfers.ranks, transfers.sizes).astype(np.int64)
    for rank in np.flatnonzero(sizes).tolist():
        yield rank, np.empty(sizes[rank] + _CRC.size, np.uint8)


def _slice_messages(
    transfers: Sequence[CellTransfer], messages: dict[int, Bytes]
) -> Iterator[tuple[CellTransfer, Bytes]]:
    """Yield each transfer with its bytes in the message: a message has them in the order of the plan."""
    used = dict.fromkeys(messages, 0)
    for transfer in transfers:
        start = used[transfer.rank]
        used[transfer.rank] = stop = start + transfer.stop - transfer.start
        yield transfer, messages[transfer.rank][start:stop]
