"""Transfers of bytes of parts between ranks of different hosts, over the job's own network.

A transfer is planned by a pure function, which gives the same order to all ranks: between two ranks, sends and receives
match, because both make them in this order.

Loads (:mod:`rankless.load.part_fetch`), copies, parity and rebuilds run transfers on every rank, inside a vote. Rank 0
plans the transfers of a load and sends the plan; each rank plans the others for itself, from the same arguments.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from rankless.engine.io.p2p import Lane, P2PExchange
from rankless.engine.plan.number_ranges import merge_spans
from rankless.errors import CorruptCheckpointError
from rankless.ondisk.block_crcs import crc64
from rankless.process.prepared_types import prepared
from rankless.storage.aligned_memory import Bytes

#: The most bytes of one message.
MESSAGE_BYTES = 8 * 2**20

#: The most bytes that a rank sends, and receives, at a time, and the most messages: many are small.
_SENT_BYTES, _RECEIVED_BYTES, _MESSAGES = 32 * 2**20, 64 * 2**20, 128

_CRC_BYTES = 8


@prepared
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


#: Returns memory with the bytes of a part, or for the bytes of a transfer.
SourceOf = Callable[[int], Bytes]
SinkOf = Callable[[Transfer], Bytes]

#: Is called with the bytes of a transfer when they are there.
OnReceived = Callable[[Transfer, Bytes], None]


def ignore_bytes(transfer: Transfer, data: Bytes) -> None:
    """Do nothing with received bytes, which are where they belong."""
    del transfer, data


class _PartMessage(NamedTuple):
    """A message under way: its bytes, and the CRC that the sender adds. ``arrival`` is done when both are there."""

    transfer: Transfer
    data: Bytes
    crc: Bytes
    arrival: Future[None]


@dataclass(frozen=True)
class TransferEnds:
    """The memory at the ends of transfers. ``rate`` is the most bytes a second that this rank sends.

    Without ``sink_of``, received bytes are in memory that is used again after ``on_received``.
    """

    source_of: SourceOf
    sink_of: SinkOf | None = None
    on_received: OnReceived = ignore_bytes
    rate: float | None = None


def run_transfers(transfers: Sequence[Transfer], p2p: P2PExchange, ends: TransferEnds) -> None:
    """Send and receive this rank's share of the transfers, both at the same time.

    Raises ``CorruptCheckpointError`` if bytes have changed on their way, and the errors of :meth:`P2PExchange.wait`.
    """
    for transfer in transfers:
        if p2p.rank == transfer.sender == transfer.receiver:
            ends.on_received(transfer, ends.source_of(transfer.part)[transfer.start : transfer.stop])
    remote = [transfer for transfer in transfers if transfer.sender != transfer.receiver]
    outgoing = _Outgoing([transfer for transfer in remote if transfer.sender == p2p.rank], p2p, ends)
    incoming = _Incoming([transfer for transfer in remote if transfer.receiver == p2p.rank], p2p, ends)
    while True:
        incoming.advance()
        outgoing.advance()
        if outgoing.queue.is_empty and incoming.queue.is_empty:
            return
        if arrivals := [*incoming.queue.next_arrival(), *outgoing.queue.next_arrival()]:
            p2p.wait_for_any(arrivals, outgoing.seconds_until_due())
        else:
            time.sleep(max(0.0, outgoing.seconds_until_due()))


class _Queue:
    """Transfers that wait, and messages under way: at most ``_MESSAGES`` with at most ``limit`` bytes, or one."""

    def __init__(self, transfers: Iterable[Transfer], limit: int) -> None:
        self._waiting, self._limit = deque(transfers), limit
        self._under_way: deque[_PartMessage] = deque()
        self._nbytes = 0

    @property
    def has_room(self) -> bool:
        """True if the next transfer may begin."""
        if not self._waiting or len(self._under_way) == _MESSAGES:
            return False
        return not self._under_way or self._nbytes + self._waiting[0].nbytes <= self._limit

    def begin_next(self, begin: Callable[[Transfer], _PartMessage]) -> None:
        """Begin the next transfer."""
        message = begin(self._waiting.popleft())
        self._under_way.append(message)
        self._nbytes += message.transfer.nbytes

    def pop_arrived(self) -> Iterator[_PartMessage]:
        """Yield the messages that have arrived, in order. Raises the error of one that cannot."""
        while self._under_way and self._under_way[0].arrival.done():
            message = self._under_way.popleft()
            self._nbytes -= message.transfer.nbytes
            message.arrival.result()
            yield message

    def next_arrival(self) -> Iterator[Future[None]]:
        """Yield the future of the oldest message under way, if there is one."""
        yield from (message.arrival for message in islice(self._under_way, 1))

    @property
    def is_empty(self) -> bool:
        """True if all messages have arrived."""
        return not self._waiting and not self._under_way


class _Outgoing:
    """The sends of this rank."""

    def __init__(self, transfers: Iterable[Transfer], p2p: P2PExchange, ends: TransferEnds) -> None:
        self.queue, self._p2p, self._ends = _Queue(transfers, _SENT_BYTES), p2p, ends
        self._sent, self._began = 0, time.monotonic()

    def advance(self) -> None:
        """Forget sends that have arrived, and begin more."""
        for _ in self.queue.pop_arrived():
            pass
        while self.seconds_until_due() <= 0:
            self.queue.begin_next(self._begin)

    def _begin(self, transfer: Transfer) -> _PartMessage:
        self._sent += transfer.nbytes
        data = self._ends.source_of(transfer.part)[transfer.start : transfer.stop]
        crc = np.frombuffer(crc64(data).to_bytes(_CRC_BYTES, "little"), np.uint8).copy()
        works = self._p2p.send(data, transfer.receiver), self._p2p.send(crc, transfer.receiver)
        return _PartMessage(transfer, data, crc, self._p2p.begin_wait(works, Lane.SENDS))

    def seconds_until_due(self) -> float:
        """Return the seconds until the rate lets the next send begin; infinity if no time does."""
        if not self.queue.has_room:
            return math.inf
        return 0.0 if self._ends.rate is None else self._began + self._sent / self._ends.rate - time.monotonic()


class _Incoming:
    """The receives of this rank. They begin early: a sender waits for the receiver before it sends."""

    def __init__(self, transfers: Iterable[Transfer], p2p: P2PExchange, ends: TransferEnds) -> None:
        self.queue, self._p2p, self._ends = _Queue(transfers, _RECEIVED_BYTES), p2p, ends
        self._buffers: list[Bytes] = []

    def advance(self) -> None:
        """Compare bytes that have arrived with their CRC, and begin more receives."""
        for message in self.queue.pop_arrived():
            self._finish(message)
        while self.queue.has_room:
            self.queue.begin_next(self._begin)

    def _begin(self, transfer: Transfer) -> _PartMessage:
        data, crc = self._memory_for(transfer), np.empty(_CRC_BYTES, np.uint8)
        works = self._p2p.receive(data, transfer.sender), self._p2p.receive(crc, transfer.sender)
        return _PartMessage(transfer, data, crc, self._p2p.begin_wait(works, Lane.RECEIVES))

    def _memory_for(self, transfer: Transfer) -> Bytes:
        if self._ends.sink_of is not None:
            return self._ends.sink_of(transfer)
        is_full = transfer.nbytes == MESSAGE_BYTES
        return self._buffers.pop() if is_full and self._buffers else np.empty(transfer.nbytes, np.uint8)

    def _finish(self, message: _PartMessage) -> None:
        transfer = message.transfer
        if crc64(message.data) != int.from_bytes(message.crc.tobytes(), "little"):
            raise CorruptCheckpointError(
                f"bytes of the part of rank {transfer.part} have changed on their way from rank {transfer.sender} to "
                f"rank {transfer.receiver}"
            )
        self._ends.on_received(transfer, message.data)
        if self._ends.sink_of is None and transfer.nbytes == MESSAGE_BYTES:
            self._buffers.append(message.data)
