"""The execution of a copy between running ranks: bytes go from the tensors of one rank into another rank's tensors.

All messages have one order, which is the same on all ranks, and each rank has a few of its own in flight. So the oldest
message never waits for a younger one. Every message is hashed on both sides.

:mod:`rankless.live_copy.copy_operation` runs it on every rank, in the vote "copying". A rank with an error must pass
all its messages on before it raises.

A message that is one range of a tensor is sent from this tensor, or received into it. CRCs are sent after all messages,
so no message is copied to make room for its CRC.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rankless.engine.io.p2p import P2PExchange, SentBytes
from rankless.engine.io.requests import ShardOf
from rankless.engine.io.strided_bytes import Pieces, gather_pieces, scatter_pieces
from rankless.engine.plan.copy_plan import CopyPlan, CopyRun, split_into_messages
from rankless.errors import PeerFailedError, RankFailedError
from rankless.ondisk.block_crcs import crc64
from rankless.storage.aligned_memory import Bytes

#: The most messages of one rank in flight: each has at most a chunk of 4 MiB in memory.
_IN_FLIGHT = 8

_CRC = np.dtype("<u8")


class _MessageTurn(NamedTuple):
    """The place of a message in the order of all messages: one message of each pair of ranks in turn, in rounds."""

    round: int
    distance: int
    sender: int


class _Message(NamedTuple):
    """One message to, or from, another rank."""

    turn: _MessageTurn
    peer: int
    is_sent: bool
    runs: Sequence[CopyRun]


class _MessageInFlight(NamedTuple):
    """A message in flight, and its bytes. If received bytes ``are_in_place``, they lie in a tensor itself."""

    message: _Message
    work: SentBytes
    data: Bytes
    are_in_place: bool = False


@dataclass(frozen=True)
class CopiedBytes:
    """The bytes of tensors that one rank has sent, received, and copied from its own tensors."""

    sent: int
    received: int
    local: int


class CopyExchange:
    """The part of one of ``size`` ranks in a copy.

    ``source_of`` returns this rank's shard of a tensor that it gives, ``target_of`` of one that it receives.
    """

    def __init__(self, plan: CopyPlan, source_of: ShardOf, target_of: ShardOf, size: int) -> None:
        self._plan, self._source_of, self._target_of, self._size = plan, source_of, target_of, size
        self._in_flight: deque[_MessageInFlight] = deque()
        self._sent_crcs: dict[int, list[int]] = {}
        #: By sender, the CRC of each received message, and a tensor in it.
        self._received_crcs: dict[int, list[tuple[int, int]]] = {}
        #: The first error of this rank. It goes on to pass bytes, so that the connections stay usable.
        self._error: Exception | None = None

    def copy_local(self) -> None:
        """Copy the bytes that this rank holds itself."""
        for runs in split_into_messages(self._plan.local):
            for run in runs:
                scatter_pieces(self._target_of(run.tensor), _target_pieces(run), _pack([run], self._source_of))

    def exchange(self, p2p: P2PExchange) -> None:
        """Send and receive. Raises ``RankFailedError`` if a connection breaks, or received bytes have changed.

        An error of this rank, such as one of a device, is raised when all messages have passed.
        """
        for message in self._iterate_messages(p2p.rank):
            if len(self._in_flight) == _IN_FLIGHT:
                self._finish_oldest(p2p)
            self._in_flight.append(self._begin(message, p2p))
        while self._in_flight:
            self._finish_oldest(p2p)
        self._compare_crcs(p2p)
        if self._error is not None:
            raise self._error

    def count_bytes(self) -> CopiedBytes:
        """Return the number of bytes that the plan moves on this rank."""
        plan = self._plan
        return CopiedBytes(_total(plan.sent), _total(plan.received), sum(run.nbytes for run in plan.local))

    def _iterate_messages(self, rank: int) -> Iterator[_Message]:
        sent = (self._messages_of_pair(rank, peer, runs, is_sent=True) for peer, runs in self._plan.sent.items())
        received = (
            self._messages_of_pair(peer, rank, runs, is_sent=False) for peer, runs in self._plan.received.items()
        )
        return heapq.merge(*sent, *received, key=lambda message: message.turn)

    def _messages_of_pair(
        self, sender: int, receiver: int, runs: Sequence[CopyRun], *, is_sent: bool
    ) -> Iterator[_Message]:
        distance = (receiver - sender) % self._size
        for number, message_runs in enumerate(split_into_messages(runs)):
            turn = _MessageTurn(number, distance, sender)
            yield _Message(turn, receiver if is_sent else sender, is_sent, message_runs)

    def _begin(self, message: _Message, p2p: P2PExchange) -> _MessageInFlight:
        view: Bytes | None = None
        with self._errors_noted():
            if message.is_sent:
                view = _pack(message.runs, self._source_of)
            else:
                view = _view_in_place(message.runs, self._target_of)
        data = np.empty(_count(message.runs), np.uint8) if view is None else view
        if message.is_sent:
            self._sent_crcs.setdefault(message.peer, []).append(crc64(data))
            return _MessageInFlight(message, p2p.send(data, message.peer), data)
        return _MessageInFlight(message, p2p.receive(data, message.peer), data, are_in_place=view is not None)

    @contextmanager
    def _errors_noted(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised at the end
            self._error = self._error or error

    def _finish_oldest(self, p2p: P2PExchange) -> None:
        message, work, data, are_in_place = self._in_flight.popleft()
        try:
            p2p.wait([work])
        except PeerFailedError:
            raise
        except RankFailedError as error:
            raise RankFailedError(f"{self._describe(message)}: {error}") from error
        if message.is_sent:
            return
        self._received_crcs.setdefault(message.peer, []).append((crc64(data), message.runs[0].tensor))
        if not are_in_place:
            with self._errors_noted():
                _unpack(message.runs, data, self._target_of)

    def _describe(self, message: _Message) -> str:
        group, name = self._plan.tensors[message.runs[0].tensor]
        way = f"to rank {message.peer}" if message.is_sent else f"from rank {message.peer}"
        return f"could not copy {group} tensor {name!r} {way}"

    def _compare_crcs(self, p2p: P2PExchange) -> None:
        """Compare the CRCs of all messages with those that their senders have computed."""
        expected = {peer: np.empty(len(crcs), _CRC) for peer, crcs in sorted(self._received_crcs.items())}
        works = [p2p.receive(crcs.view(np.uint8), peer) for peer, crcs in expected.items()]
        sent = {peer: np.array(crcs, _CRC) for peer, crcs in sorted(self._sent_crcs.items())}
        p2p.wait(works + [p2p.send(crcs.view(np.uint8), peer) for peer, crcs in sent.items()])
        for peer, crcs in expected.items():
            for crc, (received, tensor) in zip(crcs.tolist(), self._received_crcs[peer], strict=True):
                if crc != received:
                    group, name = self._plan.tensors[tensor]
                    raise RankFailedError(
                        f"bytes of {group} tensor {name!r}, or of one after it, that rank {peer} sent to rank "
                        f"{p2p.rank} do not match their CRC: they changed on their way, or while they were sent"
                    )


def _pack(runs: Sequence[CopyRun], source_of: ShardOf) -> Bytes:
    """Return the bytes of a message; if it is one range of a tensor, its own memory if possible."""
    if len(runs) == 1 and runs[0].number == 1:
        view = source_of(runs[0].tensor).view(runs[0].source, runs[0].source + runs[0].size)
        if view is not None:
            return view
    data = np.empty(_count(runs), np.uint8)
    start = 0
    for run in runs:
        pieces = Pieces(run.source, run.size, run.number, run.source_step)
        gather_pieces(source_of(run.tensor), pieces, data[start : start + run.nbytes])
        start += run.nbytes
    return data


def _view_in_place(runs: Sequence[CopyRun], target_of: ShardOf) -> Bytes | None:
    """Return the memory of a tensor that a whole message goes into, if there is such."""
    if len(runs) > 1 or runs[0].number > 1:
        return None
    return target_of(runs[0].tensor).view(runs[0].target, runs[0].target + runs[0].size)


def _unpack(runs: Sequence[CopyRun], data: Bytes, target_of: ShardOf) -> None:
    start = 0
    for run in runs:
        scatter_pieces(target_of(run.tensor), _target_pieces(run), data[start : start + run.nbytes])
        start += run.nbytes


def _target_pieces(run: CopyRun) -> Pieces:
    return Pieces(run.target, run.size, run.number, run.target_step)


def _count(runs: Sequence[CopyRun]) -> int:
    return sum(run.nbytes for run in runs)


def _total(runs_by_peer: Mapping[int, Sequence[CopyRun]]) -> int:
    return sum(map(_count, runs_by_peer.values()))
