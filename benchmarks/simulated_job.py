"""The other ranks of a job, simulated for a real rank 0: what they post in the votes of a save, and send to it.

Rank 0 runs the product unchanged. Its key-value store calls :meth:`SimulatedPeers.act` whenever rank 0 polls, and all
other ranks take their next step there, with the product's own code for meeting, voting, and encoding: each rank and
each host sends the messages that it would send as a process. Not simulated: their training objects (all specs are those
of rank 0), and that they plan; their CRCs are those of zeros.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from benchmarks.counting_store import CountingStore
from rankless.engine.comm.daemon_executor import DaemonExecutor
from rankless.engine.comm.host_map import HostMap
from rankless.engine.comm.host_vote_channel import HostVoteChannel
from rankless.engine.comm.job_store import DeadlineStore
from rankless.engine.comm.rendezvous import Rendezvous
from rankless.engine.comm.vote import VoteOutcome
from rankless.engine.comm.vote_channel import VoteChannel
from rankless.engine.integrity.crc_gather import bucket_size
from rankless.engine.integrity.fragments import FragmentTable, merge_adjacent_fragments
from rankless.engine.plan.tensor_specs import digest_bytes
from rankless.ondisk.block_crcs import crc64
from rankless.storage.host_mailbox import HostMailbox

T = TypeVar("T")

#: The name of the backend: the product sends over a group whose backend is gloo.
BACKEND = "gloo_simulated"

#: The place of the digest of the host in an announcement, behind the digests of the call: see save_negotiation.
_HOST = slice(24 + 56, 24 + 64)

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(VoteOutcome).decode

#: The samples of a file of which a rank writes nothing, and those of one in which all that was compared has changed.
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
    """The store of a rank that knows the name of the session."""

    def __init__(self, store: dist.Store, prefix: str) -> None:
        super().__init__(store, InlineExecutor(), 600)
        self._prefix = prefix

    def _full_key(self, key: str) -> str:
        return self._prefix + key


class SimulatedPeers:
    """All ranks but rank 0."""

    def __init__(self, size: int, ranks_per_host: int, report_of: Callable[[int], bytes]) -> None:
        self.size, self.hosts = size, HostMap(tuple(rank // ranks_per_host for rank in range(size)))
        self._report_of = report_of
        self.store: CountingStore | None = None
        self._rendezvous = [Rendezvous(rank, size) for rank in range(1, size)]
        self._is_acting, self._has_met = False, 0
        self._voted: set[str] = set()
        self._waiting: list[VoteChannel] = []
        self.phases: Sequence[str] = ()
        #: The size of what each rank sends to rank 0 through the store.
        self.message_sizes: dict[int, int] = {}
        #: The seconds of processor time of all peers, and when they worked.
        self.seconds, self.intervals = 0.0, list[tuple[int, int]]()

    def act(self, keys: Sequence[str]) -> None:
        """Take the steps that the poll of rank 0 for some keys makes possible."""
        if self._is_acting or "rankless/" not in keys[0]:
            return
        self._is_acting, cpu, wall = True, time.thread_time(), time.perf_counter_ns()
        try:
            self._act_on(keys)
        finally:
            self._is_acting = False
            self.seconds += time.thread_time() - cpu
            self.intervals.append((wall, time.perf_counter_ns()))

    def _act_on(self, keys: Sequence[str]) -> None:
        base, _, rest = keys[0].partition("rankless/")
        group, members, *parts = rest.split("/")
        shared = f"{base}rankless/{group}/{members}/"
        if self._has_met == 0 or (self._has_met == 1 and parts[0] == "known"):
            self._meet(shared)
        if len(parts[0]) != 16:
            return
        session = f"{shared}{parts[0]}/{parts[1]}/"
        name = parts[2:]
        if name[0] == "message":
            self._send_messages(keys)
        elif name[0] == "parted":
            self._leave(session)
        elif name[0].isdecimal() and name[1] in ("0", "host") and session + name[0] not in self._voted:
            self._voted.add(session + name[0])
            self._vote(session, int(name[0]), by_host=name[1] == "host")

    def _meet(self, shared: str) -> None:
        self._has_met += 1
        for rendezvous in self._rendezvous:
            rendezvous.poll_name(PeerStore(self._counted(), shared))

    def _counted(self) -> CountingStore:
        assert self.store is not None
        return self.store

    def _vote(self, session: str, vote: int, *, by_host: bool) -> None:
        self._end_vote()
        store = PeerStore(self._counted(), session)
        phase = self.phases[vote - 1]
        if not by_host:
            own = _unpack(self._counted().store.get(f"{session}{vote}/0"))
            channel = VoteChannel(store, vote, self.size)
            for rank in range(1, self.size):
                channel.post_outcome(rank, _pack(self._outcome_of(rank, own, phase, store)))
            self._waiting = [channel] * (self.size - 1)
            return
        prefix = "/".join(session.split("/")[-3:])
        boards = [HostMailbox(f"{prefix}{host}/{vote}".replace("/", "-")) for host in range(len(self.hosts.ranks_of))]
        raw = boards[0].read("0")
        assert raw is not None
        own = _unpack(raw)
        for rank in range(1, self.size):
            channel = HostVoteChannel(store, vote, self.hosts, rank, boards[self.hosts.host_of[rank]])
            channel.begin_wait(600)
            channel.post_outcome(rank, _pack(self._outcome_of(rank, own, phase, store)))
            self._waiting.append(channel)

    def _end_vote(self) -> None:
        """Let all ranks read the decision of the vote before."""
        for channel in self._waiting:
            if channel.is_decided():
                channel.read_decision()
            channel.close()
        self._waiting = []

    def _outcome_of(self, rank: int, own: VoteOutcome, phase: str, store: PeerStore) -> VoteOutcome:
        host = self.hosts.host_of[rank]
        payload, digest = own.payload, digest_bytes(f"simulated {host}".encode(), 8)
        if phase == "looking at what to save":
            for samples in _UNCHANGED:
                payload = payload.replace(samples, _ALL_CHANGED)
            payload = payload[: _HOST.start] + digest + payload[_HOST.stop :] if host else payload
        if phase == "writing":
            payload = payload.replace(b'"0/', b'"%d/' % rank)
            if self.size <= 64:
                report: dict[str, Any] = msgspec.msgpack.decode(own.payload)
                values = report["payload"].replace(b'"0/', b'"%d/' % rank)
                payload = _pack({"crcs": self._report_of(rank), "payload": values})
            else:
                store.set(f"hashed/{phase}/{rank}", self._report_of(rank))
        if phase == "gathering CRCs":
            payload = self._merge_bucket(rank, store)
        return msgspec.structs.replace(own, payload=payload, host=digest if own.host and host else own.host)

    def _merge_bucket(self, rank: int, store: PeerStore) -> bytes:
        bucket = self._bucket_of.get(rank)
        if bucket is None:
            return b""
        reports = store.get(*(f"hashed/writing/{other}" for other in bucket))
        return merge_adjacent_fragments(FragmentTable.from_bytes(reports)).to_bytes()

    def set_rank_order(self, rank_order: Sequence[int]) -> None:
        """Set the order in which ranks are put into buckets."""
        size = bucket_size(self.size)
        buckets = (rank_order[first : first + size] for first in range(0, self.size, size))
        self._bucket_of = {bucket[0]: bucket for bucket in buckets}

    def _send_messages(self, keys: Sequence[str]) -> None:
        for key in keys:
            sender = int(key.rsplit("/", 1)[1])
            self._counted().set(key, append_crc(bytes(self.message_sizes[sender])))

    def _leave(self, session: str) -> None:
        if session in self._voted:
            return
        self._voted.add(session)
        self._end_vote()
        store = PeerStore(self._counted(), session)
        for rank in range(1, self.size):
            if self.hosts.can_combine:
                HostVoteChannel(store, "parted", self.hosts, rank, HostMailbox("unused")).depart(rank)
            else:
                VoteChannel(store, "parted", self.size).depart(rank)


def append_crc(data: bytes) -> bytes:
    """Return the message of a cell exchange."""
    return data + crc64(data).to_bytes(8, "little")


class _DoneWork(dist._Work):
    def wait(self, timeout: timedelta | None = None) -> bool:
        del timeout
        return True


class SimulatedGroup(dist.ProcessGroup):
    """A process group that receives zeros and their CRC, as ranks exchange cells."""

    group_name = "0"

    def getBackendName(self) -> str:
        return BACKEND

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> dist.Work:
        del tensors, dst, tag
        return _DoneWork()

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> dist.Work:
        del src, tag
        zeros = bytes(len(tensors[0]) - 8)
        tensors[0].copy_(torch.frombuffer(bytearray(append_crc(zeros)), dtype=torch.uint8))
        return _DoneWork()


def init_simulated_group(store: CountingStore, size: int) -> None:
    """Make rank 0's default process group of ``size`` ranks."""
    dist.Backend.register_backend(BACKEND, lambda _, rank, size, __: SimulatedGroup(rank, size), devices=["cpu"])
    dist.init_process_group(BACKEND, store=store, rank=0, world_size=size)
