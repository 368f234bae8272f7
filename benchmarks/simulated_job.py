"""The other ranks of a job, simulated for a real rank 0: what they post in the votes of a save, and send to it.

Rank 0 runs the product unchanged. Its key-value store calls :meth:`SimulatedPeers.act` whenever rank 0 polls, and the
other ranks take their next step there, with the product's own code for meeting, voting and encoding: each rank and each
host sends the messages to the store that it would send as a process. The ranks of rank 0's host also use the messages
within the host. Not simulated: the training objects of other ranks (their specs are those of rank 0), and the files
that they write; the CRCs that they report are drawn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import Work
from torch.distributed.distributed_c10d import Store

from benchmarks.counting_store import CountingStore
from benchmarks.simulated_reports import Reports, merge_reports
from rankless.engine.comm.daemon_executor import DaemonExecutor
from rankless.engine.comm.host_map import HostMap, combine_outcomes
from rankless.engine.comm.host_messages import HostMessages
from rankless.engine.comm.host_vote_channel import HostVoteChannel
from rankless.engine.comm.job_store import DeadlineStore
from rankless.engine.comm.rendezvous import Rendezvous
from rankless.engine.comm.vote import VoteOutcome
from rankless.engine.comm.vote_channel import VoteChannel
from rankless.engine.integrity.crc_gather import MAX_FLAT_RANKS, bucket_size, first_ranks_of_hosts
from rankless.engine.io.cell_exchange import MAX_STORED_BYTES
from rankless.engine.plan.tensor_specs import digest_bytes
from rankless.ondisk.block_crcs import crc64
from rankless.storage.host_mailbox import HostMailbox

T = TypeVar("T")

#: The name of the backend: the product sends over a group whose backend is gloo.
BACKEND = "gloo_simulated"

LOOKING, PREPARING, WRITING = "looking at what to save", "preparing the save", "writing"

#: The digits of the name of the sessions of a group.
_NAME_DIGITS = 16

#: The bytes behind a message.
_CRC_BYTES = 8

#: The place of the digest of the host in an announcement, behind the digests of the call: see save_negotiation.
_HOST = slice(24 + 56, 24 + 64)

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(VoteOutcome).decode

#: The samples of a file that a rank takes for unchanged, and those of one in which all that was compared has changed.
_UNCHANGED, _ALL_CHANGED = (_pack((True, False)), _pack((True, True))), _pack((False, False))


class InlineExecutor(DaemonExecutor):
    """An executor that runs calls in the calling thread."""

    def __init__(self) -> None:
        super().__init__("simulated store")

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run a call."""
        future: Future[T] = Future()
        future.set_result(call())
        return future

    def call_with_timeout(self, seconds: float, call: Callable[[], T]) -> T:
        """Run a call."""
        del seconds
        return call()


class PeerStore(DeadlineStore):
    """The store of ranks that know the ``prefix`` of keys: of the group, or of a session."""

    def __init__(self, store: Store, prefix: str) -> None:
        super().__init__(store, InlineExecutor(), 600)
        self._prefix = prefix

    def _full_key(self, key: str) -> str:
        return self._prefix + key


class SimulatedPeers:
    """All ranks but rank 0. ``begin_save`` must be called before each save."""

    def __init__(self, size: int, ranks_per_host: int) -> None:
        self.size, self.hosts = size, HostMap(tuple(rank // ranks_per_host for rank in range(size)))
        self._reports: Reports | None = None
        self._store: CountingStore | None = None
        self._meeting = [Rendezvous(rank, size) for rank in range(1, size)]
        self._is_acting = False
        self._done: set[str] = set()
        self._channels: list[VoteChannel] = []
        self._phases: Sequence[str] = ()
        self._buckets: dict[int, list[int]] = {}
        #: The seconds of processor time of all peers since the save has begun.
        self.seconds = 0.0

    def connect(self, store: CountingStore, reports: Reports) -> None:
        """Set the store of all ranks, and what they report."""
        self._store, self._reports = store, reports
        order = list(reports.rank_order)
        if self.hosts.can_combine:
            order = list(first_ranks_of_hosts(self.hosts.host_of, order))
        size = bucket_size(len(order))
        buckets = (order[first : first + size] for first in range(0, len(order), size))
        self._buckets = {bucket[0]: bucket for bucket in buckets}

    def begin_save(self, *, is_first: bool) -> None:
        """Begin a save: the votes of the first one are others than those of the next ones."""
        gathering = ["gathering CRCs"] if self.size > MAX_FLAT_RANKS else []
        self._phases = [LOOKING, *([PREPARING] if is_first else []), WRITING, *gathering]
        self.seconds = 0.0

    def act(self, keys: Sequence[str]) -> None:
        """Take the steps that the poll of rank 0 for some keys makes possible."""
        if self._is_acting or "rankless/" not in keys[0] or self._store is None:
            return
        started, self._is_acting = time.thread_time(), True
        try:
            self._act_on(keys, self._store)
        finally:
            self._is_acting = False
            self.seconds += time.thread_time() - started

    def _act_on(self, keys: Sequence[str], store: CountingStore) -> None:
        base, _, rest = keys[0].partition("rankless/")
        group, members, *name = rest.split("/")
        shared = f"{base}rankless/{group}/{members}/"
        self._meet(store, shared)
        if self._meeting or len(name[0]) != _NAME_DIGITS:  # not a key of a session
            return
        prefix = f"{name[0]}/{name[1]}/"
        if name[2] == "message":
            self._send_messages(store, keys)
        elif shared + prefix + name[2] not in self._done and name[3] in ("0", "host"):
            self._done.add(shared + prefix + name[2])
            vote = _Vote(name[2], prefix, PeerStore(store, shared + prefix), is_by_host=name[3] == "host")
            self._end_vote()
            if vote.name == "parted":
                self._leave(vote)
            else:
                self._post_outcomes(vote)

    def _meet(self, store: CountingStore, shared: str) -> None:
        for rendezvous in self._meeting:
            rendezvous.poll_name(PeerStore(store, shared))
        self._meeting = [rendezvous for rendezvous in self._meeting if not rendezvous.is_over]

    def _post_outcomes(self, vote: _Vote) -> None:
        if self._phases[int(vote.name) - 1] == WRITING:
            self._receive_from_rank_0(vote)
        if not vote.is_by_host:
            (raw,) = vote.store.get(f"{vote.name}/0")
            self._count_back(len(raw))
            channel = VoteChannel(vote.store, vote.name, self.size)
            for rank in range(1, self.size):
                channel.post_outcome(rank, self._outcome_of(rank, _unpack(raw), vote))
            self._channels = [channel] * (self.size - 1)
            return
        board = vote.open_board(0)
        own = _unpack(board.read("0") or b"")
        for rank in self.hosts.ranks_of[0][1:]:
            channel = HostVoteChannel(vote.store, vote.name, self.hosts, rank, board)
            channel.begin_wait(600)
            channel.post_outcome(rank, self._outcome_of(rank, own, vote))
            self._channels.append(channel)
        for host, ranks in enumerate(self.hosts.ranks_of[1:], 1):
            outcomes = [self._outcome_of(rank, own, vote) for rank in ranks]
            vote.store.set(f"{vote.name}/host/{host}", combine_outcomes(outcomes))
        self._channels += [VoteChannel(vote.store, vote.name, self.size)] * (len(self.hosts.ranks_of) - 1)

    def _count_back(self, nbytes: int) -> None:
        """Take back the count of a message of rank 0 that only the simulation has read."""
        if self._store is not None:
            self._store.traffic.read["votes"].remove(nbytes)

    def _end_vote(self) -> None:
        """Let all ranks, or one of each host, read the decision of the vote before."""
        for channel in self._channels:
            if channel.is_decided():
                channel.read_decision()
            channel.close()
        self._channels = []

    def _outcome_of(self, rank: int, own: VoteOutcome, vote: _Vote) -> bytes:
        """Return what a rank posts, given what rank 0 has posted."""
        phase, host = self._phases[int(vote.name) - 1], self.hosts.host_of[rank]
        payload, digest = own.payload, digest_bytes(f"simulated {host}".encode(), 8)
        if phase == LOOKING:
            payload = self._sample(rank, payload)
            payload = payload[: _HOST.start] + digest + payload[_HOST.stop :] if host else payload
        elif phase == WRITING:
            payload = self._report(rank, own.payload, vote)
        elif phase != PREPARING:
            payload = self._merge_bucket(rank, vote)
        return _pack(msgspec.structs.replace(own, payload=payload, host=digest if own.host and host else own.host))

    def _sample(self, rank: int, payload: bytes) -> bytes:
        """Return an announcement in which all has changed of the files that a rank writes."""
        for samples in _UNCHANGED:
            payload = payload.replace(samples, _ALL_CHANGED)
        files = self._require_reports().sample_files(rank)
        samples = b"".join(_ALL_CHANGED if is_written else _UNCHANGED[0] for is_written in files)
        return payload.replace(_ALL_CHANGED * len(files), samples)

    def _require_reports(self) -> Reports:
        if self._reports is None:
            raise RuntimeError("peers are not connected")
        return self._reports

    def _exchange(self, rank: int, vote: _Vote) -> None:
        """Send to other ranks, and receive what they have sent. :meth:`_send_messages` sends to rank 0."""
        reports = self._require_reports()
        for receiver, size in reports.sent_sizes(rank).items():
            if receiver and size + _CRC_BYTES <= MAX_STORED_BYTES:
                key = f"message/0/{receiver}/{rank}"
                vote.store.set(key, append_crc(bytes(size)))
                vote.store.get(key)
                vote.store.delete_keys(key)

    def _receive_from_rank_0(self, vote: _Vote) -> None:
        for receiver, size in self._require_reports().sent_sizes(0).items():
            if size + _CRC_BYTES <= MAX_STORED_BYTES:
                vote.store.get(f"message/0/{receiver}/0")

    def _report(self, rank: int, own: bytes, vote: _Vote) -> bytes:
        """Report the CRCs of a rank. Return its payload."""
        reports = self._require_reports()
        self._exchange(rank, vote)
        if self.size <= MAX_FLAT_RANKS:
            report: dict[str, Any] = msgspec.msgpack.decode(own)
            return _pack({"crcs": reports.of(rank), "payload": _of_rank(report["payload"], rank)})
        values = _of_rank(own[1:], rank)
        if not self.hosts.can_combine:
            vote.store.set(f"hashed/{WRITING}/{vote.name}/{rank}", reports.packed(rank))
            return b"+" + values
        host = self.hosts.host_of[rank]
        if host:
            is_last = rank == self.hosts.ranks_of[host][-1]
            report_of_host = reports.packed_of_host(host) if is_last else b""
        else:
            messages = HostMessages(vote.open_board(0, "-hashed"), self.hosts, rank).post(reports.packed(rank))
            is_last, report_of_host = bool(messages), merge_reports(messages)
        if is_last:
            vote.store.set(f"hashed/{WRITING}/{vote.name}/host/{host}", report_of_host)
        return (b"+" if is_last else b".") + values

    def _merge_bucket(self, rank: int, vote: _Vote) -> bytes:
        """Return the merged CRCs of a bucket on its first rank."""
        host = self.hosts.host_of[rank]
        by_host = self.hosts.can_combine
        if by_host and self.hosts.ranks_of[host][0] != rank:
            return b""
        bucket = self._buckets.get(host if by_host else rank, [])
        prefix = f"hashed/{WRITING}/{int(vote.name) - 1}/" + ("host/" if by_host else "")
        return merge_reports(vote.store.get(*(f"{prefix}{unit}" for unit in bucket))) if bucket else b""

    def _send_messages(self, store: CountingStore, keys: Sequence[str]) -> None:
        sizes = {} if self._reports is None else self._reports.message_sizes
        for key in keys:
            if key not in self._done:
                self._done.add(key)
                store.set(key, append_crc(bytes(sizes[int(key.rsplit("/", 1)[1])])))

    def _leave(self, vote: _Vote) -> None:
        board = HostMailbox("unused")
        flat = VoteChannel(vote.store, vote.name, self.size)
        for rank in range(1, self.size):
            channel = HostVoteChannel(vote.store, vote.name, self.hosts, rank, board) if vote.is_by_host else flat
            channel.depart(rank)


class _Vote(msgspec.Struct, frozen=True):
    """A vote of a session: its number, the prefix of its boards, and the store with the keys of the session."""

    name: str
    prefix: str
    store: PeerStore
    is_by_host: bool

    def open_board(self, host: int, suffix: str = "") -> HostMailbox:
        """Return the messages within a host."""
        return HostMailbox(f"{self.prefix}{host}/{self.name}{suffix}".replace("/", "-"))


def _of_rank(values: bytes, rank: int) -> bytes:
    """Return the values of a rank, given those of rank 0: their arrays are named by the rank."""
    return values.replace(b'"0/', b'"%d/' % rank)


def append_crc(data: bytes) -> bytes:
    """Return the message of a cell exchange."""
    return data + crc64(data).to_bytes(8, "little")


class _DoneWork(Work):
    def wait(self, timeout: timedelta | None = None) -> bool:
        del timeout
        return True


class SimulatedGroup(dist.ProcessGroup):
    """A process group that receives zeros and their CRC, as ranks exchange cells."""

    group_name = "0"  # type: ignore[assignment]

    def getBackendName(self) -> str:  # noqa: N802 - the name of torch
        """Return the name of the backend."""
        return BACKEND

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> dist.Work:
        """Send nothing."""
        del tensors, dst, tag
        return _DoneWork()

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> dist.Work:
        """Receive zeros."""
        del src, tag
        message = bytearray(append_crc(bytes(len(tensors[0]) - 8)))
        tensors[0].copy_(torch.frombuffer(message, dtype=torch.uint8))
        return _DoneWork()


def _make_group(store: Store, rank: int, size: int, timeout: timedelta) -> SimulatedGroup:
    del store, timeout
    return SimulatedGroup(rank, size)  # type: ignore[call-arg]


def init_simulated_group(store: CountingStore, size: int) -> None:
    """Make rank 0's default process group of ``size`` ranks."""
    dist.Backend.register_backend(BACKEND, _make_group, devices=["cpu"])
    dist.init_process_group(BACKEND, store=store, rank=0, world_size=size)
