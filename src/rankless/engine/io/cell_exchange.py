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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rankless.engine.comm.store_messages import StoreMessages
from rankless.engine.io.received_messages import ReceivedMessages, ReceivedRun
from rankless.engine.io.requests import ByteProvider
from rankless.engine.plan.cell_transfers import CellTransfer, TransferTable
from rankless.engine.plan.file_ranges import FileRange
from rankless.errors import RankFailedError
from rankless.ondisk.block_crcs import crc64
from rankless.storage.aligned_memory import Bytes
from rankless.storage.direct_io import BufferedWriter

if TYPE_CHECKING:
    from rankless.engine.io.p2p import P2PExchange, SentBytes

_CRC = struct.Struct("<Q")

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
        self.sent, self.p2p, self._stored = sent, p2p, stored
        self._works: list[SentBytes] = []
        self._outgoing = _allocate_messages(sent)
        self._incoming = ReceivedMessages(received, _CRC.size)
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
        incoming = self._incoming.by_rank.items()
        self._works += (self.p2p.receive(message, rank) for rank, message in incoming if not self._is_stored(message))
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
        for rank, message in self._incoming.by_rank.items():
            if _CRC.unpack(message[-_CRC.size :].tobytes()) != (crc64(message[: -_CRC.size]),):
                raise RankFailedError(f"bytes that rank {rank} sent were changed on their way: save again")
        yield from self._incoming.runs()

    def _receive_stored(self) -> None:
        incoming = self._incoming.by_rank
        senders = [rank for rank, message in incoming.items() if self._is_stored(message)]
        for rank, raw in self._stored.receive(senders):
            message = incoming[rank]
            if len(raw) != len(message):
                raise RankFailedError(f"rank {rank} sent {len(raw)} bytes instead of {len(message)}: save again")
            message[:] = np.frombuffer(raw, np.uint8)

    def _is_stored(self, message: Bytes) -> bool:
        """Return whether a message goes through the key-value store."""
        return len(message) <= self._max_stored_bytes


def _allocate_messages(transfers: Sequence[CellTransfer]) -> dict[int, Bytes]:
    """Return a buffer for the bytes that are sent to each rank, and their CRC."""
    sizes: dict[int, int] = {}
    for transfer in transfers:
        sizes[transfer.rank] = sizes.get(transfer.rank, _CRC.size) + transfer.stop - transfer.start
    return {rank: np.empty(size, np.uint8) for rank, size in sizes.items()}


def _slice_messages(
    transfers: Sequence[CellTransfer], messages: dict[int, Bytes]
) -> Iterator[tuple[CellTransfer, Bytes]]:
    """Yield each transfer with its bytes in the message: a message has them in the order of the plan."""
    used = dict.fromkeys(messages, 0)
    for transfer in transfers:
        start = used[transfer.rank]
        used[transfer.rank] = stop = start + transfer.stop - transfer.start
        yield transfer, messages[transfer.rank][start:stop]
