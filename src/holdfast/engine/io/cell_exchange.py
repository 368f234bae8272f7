"""Exchange of the bytes in cells that another host writes: see :mod:`holdfast.engine.plan.cells`.

Each pair of ranks exchanges at most one message, which ends with a CRC: the network must not change bytes unnoticed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from holdfast.engine.io.p2p import P2PExchange, SentBytes
from holdfast.engine.io.requests import ByteProvider
from holdfast.engine.plan.cells import CellTransfer
from holdfast.engine.plan.file_ranges import FileRange
from holdfast.errors import RankFailedError
from holdfast.ondisk.blocks import crc64
from holdfast.storage.direct_io import BufferedWriter
from holdfast.storage.memory import Bytes

_CRC = struct.Struct("<Q")


class CellExchange:
    """The bytes that one rank sends to other ranks, and those that it receives and writes, in one save."""

    def __init__(self, sent: Sequence[CellTransfer], received: Sequence[CellTransfer], p2p: P2PExchange) -> None:
        self.sent, self.p2p = sent, p2p
        self._works: list[SentBytes] = []
        self._outgoing = dict(_allocate_messages(sent))
        self._incoming = dict(_allocate_messages(received))
        self._sent_slices = dict(_slice_messages(sent, self._outgoing))
        self._received_slices = dict(_slice_messages(received, self._incoming))

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
        self._works += (self.p2p.receive(message, rank) for rank, message in self._incoming.items())
        for rank, message in self._outgoing.items():
            message[-_CRC.size :] = np.frombuffer(_CRC.pack(crc64(message[: -_CRC.size])), np.uint8)
            self._works.append(self.p2p.send(message, rank))

    def finish(self, files: Sequence[Path]) -> None:
        """Wait for all messages, then write the received bytes and make them durable.

        Raises ``RankFailedError`` if a message does not match its CRC.
        """
        self.p2p.wait(self._works)
        for rank, message in self._incoming.items():
            if _CRC.unpack(message[-_CRC.size :].tobytes()) != (crc64(message[: -_CRC.size]),):
                raise RankFailedError(f"bytes that rank {rank} sent were changed on their way: save again")
        for number in sorted({transfer.file for transfer in self._received_slices}):
            with BufferedWriter(files[number]) as writer:
                for transfer, data in self._received_slices.items():
                    if transfer.file == number:
                        writer.write(transfer.start, data.data)
                writer.sync()


def _allocate_messages(transfers: Sequence[CellTransfer]) -> Iterator[tuple[int, Bytes]]:
    """Yield a buffer for the bytes that are exchanged with each rank, and their CRC."""
    sizes: dict[int, int] = {}
    for transfer in transfers:
        sizes[transfer.rank] = sizes.get(transfer.rank, 0) + transfer.stop - transfer.start
    for rank, size in sizes.items():
        yield rank, np.empty(size + _CRC.size, np.uint8)


def _slice_messages(
    transfers: Sequence[CellTransfer], messages: dict[int, Bytes]
) -> Iterator[tuple[CellTransfer, Bytes]]:
    """Yield each transfer with its bytes in the message: a message has them in the order of the plan."""
    used = dict.fromkeys(messages, 0)
    for transfer in transfers:
        start = used[transfer.rank]
        used[transfer.rank] = stop = start + transfer.stop - transfer.start
        yield transfer, messages[transfer.rank][start:stop]
