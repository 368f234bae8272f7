"""Transfers of bytes of parts between ranks of different hosts, over the job's own network.

A transfer is planned by a pure function, which gives the same order to all ranks: between two ranks, sends and receives
match in the order in which both make them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from holdfast.engine.io.p2p import P2PExchange, SentBytes
from holdfast.errors import CorruptCheckpointError
from holdfast.ondisk.block_crcs import crc64
from holdfast.storage.memory import Bytes

#: The most bytes of one message, and the most messages of a rank under way.
MESSAGE_BYTES, _WINDOW = 8 * 2**20, 8

_CRC_BYTES = 8


class Transfer(NamedTuple):
    """Bytes ``[start, stop)`` of the part of rank ``part``, which one rank sends to another."""

    part: int
    start: int
    stop: int
    sender: int
    receiver: int

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.stop - self.start


#: Ranges of bytes, by the number of the part.
Spans = Mapping[int, Sequence[tuple[int, int]]]


def merge_spans(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return sorted spans that neither overlap nor touch."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        elif start < stop:
            merged.append((start, stop))
    return merged


def plan_transfers(
    needed: Sequence[Spans], host_of: Sequence[int], places: Mapping[int, Sequence[int]]
) -> list[Transfer]:
    """Return the transfers that give each host the bytes that its ranks need.

    ``needed`` has the spans that each rank needs. ``places`` has the hosts that hold each part. Each byte is sent to a
    host once, from the host that has the least to send so far; the ranks of both hosts take turns.
    """
    ranks_of: dict[int, list[int]] = {}
    for rank, host in enumerate(host_of):
        ranks_of.setdefault(host, []).append(rank)
    wanted: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for rank, spans in enumerate(needed):
        for part, of_rank in spans.items():
            if host_of[rank] not in places[part]:
                wanted.setdefault((part, host_of[rank]), []).extend(of_rank)
    sent, received = [0] * len(host_of), [0] * len(host_of)
    by_host = dict.fromkeys(ranks_of, 0)
    transfers = []
    for (part, host), of_host in sorted(wanted.items()):
        for start, stop in _split_spans(merge_spans(of_host)):
            source = min(places[part], key=lambda one: (by_host[one], one))
            sender = min(ranks_of[source], key=lambda rank: (sent[rank], rank))
            receiver = min(ranks_of[host], key=lambda rank: (received[rank], rank))
            transfers.append(Transfer(part, start, stop, sender, receiver))
            by_host[source] += stop - start
            sent[sender] += stop - start
            received[receiver] += stop - start
    return _interleave(transfers)


def _split_spans(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for start, stop in spans:
        for first in range(start, stop, MESSAGE_BYTES):
            yield first, min(stop, first + MESSAGE_BYTES)


def _interleave(transfers: Iterable[Transfer]) -> list[Transfer]:
    """Order transfers so that all pairs of ranks begin at the same time: the first of each pair, then the second."""
    counts: dict[tuple[int, int], int] = {}
    turns = []
    for transfer in transfers:
        pair = transfer.sender, transfer.receiver
        counts[pair] = counts.get(pair, -1) + 1
        turns.append((counts[pair], transfer))
    return [transfer for _, transfer in sorted(turns, key=lambda turn: turn[0])]


#: Returns memory with the bytes of a part, or for those of a transfer.
SourceOf = Callable[[int], Bytes]
SinkOf = Callable[[Transfer], Bytes]

#: Is called with the bytes of a transfer when they are there.
OnReceived = Callable[[Transfer, Bytes], None]


def ignore_bytes(transfer: Transfer, data: Bytes) -> None:
    """Do nothing with received bytes, which are where they belong."""
    del transfer, data


class _Pending(NamedTuple):
    """A message under way: its sends or receives and, on the receiver, its bytes and the CRC that the sender adds."""

    works: tuple[SentBytes, ...]
    transfer: Transfer
    data: Bytes
    crc: Bytes


@dataclass(frozen=True)
class TransferEnds:
    """The memory at the ends of transfers. ``rate`` is the most bytes a second that this rank sends."""

    source_of: SourceOf
    sink_of: SinkOf
    on_received: OnReceived = ignore_bytes
    rate: float | None = None


def run_transfers(transfers: Sequence[Transfer], p2p: P2PExchange, ends: TransferEnds) -> None:
    """Send and receive this rank's share of the transfers.

    Raises ``CorruptCheckpointError`` if bytes have changed on their way, and the errors of :meth:`P2PExchange.wait`.
    """
    pending: deque[_Pending] = deque()
    sent, started = 0, time.monotonic()
    for transfer in transfers:
        if p2p.rank == transfer.sender == transfer.receiver:
            data = ends.source_of(transfer.part)[transfer.start : transfer.stop]
            ends.on_received(transfer, data)
        elif p2p.rank == transfer.sender:
            if ends.rate is not None:
                time.sleep(max(0.0, started + sent / ends.rate - time.monotonic()))
            sent += transfer.nbytes
            data = ends.source_of(transfer.part)[transfer.start : transfer.stop]
            crc = np.frombuffer(crc64(data).to_bytes(_CRC_BYTES, "little"), np.uint8).copy()
            works = p2p.send(data, transfer.receiver), p2p.send(crc, transfer.receiver)
            pending.append(_Pending(works, transfer, data, crc))
        elif p2p.rank == transfer.receiver:
            data, crc = ends.sink_of(transfer), np.empty(_CRC_BYTES, np.uint8)
            works = p2p.receive(data, transfer.sender), p2p.receive(crc, transfer.sender)
            pending.append(_Pending(works, transfer, data, crc))
        if len(pending) >= _WINDOW:
            _finish(pending.popleft(), p2p, ends.on_received)
    while pending:
        _finish(pending.popleft(), p2p, ends.on_received)


def _finish(message: _Pending, p2p: P2PExchange, on_received: OnReceived) -> None:
    """Wait for a message, and compare what was received with its CRC."""
    p2p.wait(message.works)
    transfer = message.transfer
    if p2p.rank != transfer.receiver:
        return
    if crc64(message.data) != int.from_bytes(message.crc.tobytes(), "little"):
        raise CorruptCheckpointError(
            f"bytes of the part of rank {transfer.part} have changed on their way from rank {transfer.sender} to rank "
            f"{transfer.receiver}"
        )
    on_received(transfer, message.data)
