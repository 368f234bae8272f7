"""Gathering of the CRCs of all ranks on rank 0: in one step, or in two or three steps if there are many ranks.

1. If hosts have several ranks, the last rank of a host merges the CRCs of the host, and stores them. Otherwise, or if a
   message within a host was lost, each rank stores its own.
2. These reports are put into buckets, in an order that makes reports of adjacent bytes neighbours (see
   :mod:`rankless.engine.plan.rank_order`). The first rank of a bucket merges the reports of the bucket.
3. Rank 0 receives about as much from each bucket as from one rank.

No rank waits for another here: the vote before it ends when all have reported, and names the ranks that have not.

The votes on the writing of saves, drains, components and conversions, and the votes of incremental saves, go through
here. With more than :data:`MAX_FLAT_RANKS` ranks the decision of rank 0, such as the commit, runs in the second vote,
"gathering CRCs". No rank may read the report of another before the first vote has ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from rankless.engine.comm.host_messages import HostMessages
from rankless.engine.comm.job_store import DeadlineStore
from rankless.engine.comm.session import Session, translate_store_errors
from rankless.engine.integrity.block_sums import SUM_BYTES, BlockSums
from rankless.engine.io.column_tables import compress_rows, decompress_rows
from rankless.engine.io.fragments import (
    FRAGMENT_BYTES,
    FragmentTable,
    decode_fragments,
    encode_fragments,
    merge_adjacent_fragments,
)
from rankless.engine.io.requests import KnownFragments
from rankless.errors import RankTimeoutError
from rankless.process.prepared_types import prepared

#: The most ranks that report to rank 0 directly.
MAX_FLAT_RANKS = 64

#: The state of a rank's report: its CRCs are in the store, or another rank of the host stores them.
_STORED, _POSTED = b"+", b"."

#: The decision that all ranks store their own CRCs, because messages within a host were lost.
_LOST = b"!"


class HashedResult(NamedTuple):
    """The result of a rank's work: its fragments, and a payload for rank 0."""

    fragments: KnownFragments
    payload: bytes = b""


#: Makes rank 0's decision over the merged fragments of all ranks, and the payload of each.
DecideHashed = Callable[[KnownFragments, list[bytes]], bytes]

#: CRCs of the bytes that a rank has hashed, in some form.
Crcs = TypeVar("Crcs")


class _CrcCodec(Protocol[Crcs]):
    """A way to encode CRCs, to merge the encoded ones of several ranks, and to decode the CRCs of all ranks.

    ``row_bytes`` is the size of the numbers of one CRC.
    """

    row_bytes: int

    def encode(self, crcs: Crcs, /) -> bytes: ...

    def merge(self, reports: Iterable[bytes], /) -> bytes: ...

    def decode(self, reports: Iterable[bytes], /) -> Crcs: ...


class _FragmentCodec:
    row_bytes = FRAGMENT_BYTES

    def encode(self, crcs: KnownFragments) -> bytes:
        return encode_fragments(crcs)

    def merge(self, reports: Iterable[bytes]) -> bytes:
        return merge_adjacent_fragments(FragmentTable.from_bytes(reports)).to_bytes()

    def decode(self, reports: Iterable[bytes]) -> KnownFragments:
        return decode_fragments(reports)


class _SumCodec:
    row_bytes = SUM_BYTES

    def encode(self, crcs: BlockSums) -> bytes:
        return crcs.to_bytes()

    def merge(self, reports: Iterable[bytes]) -> bytes:
        return BlockSums.from_bytes(reports).to_bytes()

    def decode(self, reports: Iterable[bytes]) -> BlockSums:
        return BlockSums.from_bytes(reports)


def vote_with_fragments(
    session: Session,
    phase: str,
    work: Callable[[], HashedResult],
    decide: DecideHashed,
    rank_order: Sequence[int] = (),
) -> bytes:
    """Do ``work`` on every rank, and return rank 0's decision over all fragments, like ``Session.vote``.

    ``rank_order`` has all ranks, those with adjacent bytes next to each other; by default they are in ascending order.
    It must be the same on all ranks. A drain that tries again calls it with the same ``phase``.

    All ranks call it: saves and drains in the vote "writing", components and conversions in theirs.
    """

    def work_and_unpack() -> tuple[KnownFragments, bytes]:
        hashed = work()
        return hashed.fragments, hashed.payload

    return _CrcVote(session, phase, _FragmentCodec()).run(work_and_unpack, decide, rank_order)


def vote_with_sums(
    session: Session,
    phase: str,
    work: Callable[[], BlockSums],
    decide: Callable[[BlockSums], bytes],
    rank_order: Sequence[int] = (),
) -> bytes:
    """Do ``work`` on every rank, and return rank 0's decision over all sums: see :func:`vote_with_fragments`.

    All ranks of an incremental save call it, in the votes "finding unchanged bytes" and "checking frozen tensors".
    """
    return _CrcVote(session, phase, _SumCodec()).run(lambda: (work(), b""), lambda sums, _: decide(sums), rank_order)


def bucket_size(size: int) -> int:
    """Return the number of ranks in a bucket: about the number of buckets."""
    return math.isqrt(size - 1) + 1


def bucket_of(rank: int, rank_order: Sequence[int]) -> Sequence[int]:
    """Return the ranks of the bucket of a rank. The first of them merges the CRCs of all."""
    ranks_per_bucket, place = bucket_size(len(rank_order)), rank_order.index(rank)
    first = place - place % ranks_per_bucket
    return rank_order[first : first + ranks_per_bucket]


@prepared
class _Report(msgspec.Struct, frozen=True):
    """The message of a rank to rank 0."""

    crcs: bytes
    payload: bytes


class _CrcVote(msgspec.Struct, Generic[Crcs], frozen=True):
    """A vote where ranks report CRCs."""

    session: Session
    phase: str
    codec: _CrcCodec[Crcs]

    def run(
        self,
        work: Callable[[], tuple[Crcs, bytes]],
        decide: Callable[[Crcs, list[bytes]], bytes],
        rank_order: Sequence[int],
    ) -> bytes:
        """Do ``work`` on every rank, and return rank 0's decision over the merged CRCs, and the payloads of all."""
        session = self.session
        if session.store is None or session.size <= MAX_FLAT_RANKS:
            return self._vote_flat(work, decide)
        reports = StoredReports(session, session.store, self.phase, rank_order or range(session.size), self._merge)
        return self._vote_in_buckets(reports, work, decide)

    def _pack(self, report: bytes) -> bytes:
        return compress_rows(report, self.codec.row_bytes)

    def _unpack(self, reports: Iterable[bytes]) -> Iterator[bytes]:
        return (decompress_rows(packed, self.codec.row_bytes) for packed in reports if packed)

    def _merge(self, reports: Iterable[bytes]) -> bytes:
        return self._pack(self.codec.merge(self._unpack(reports)))

    def _vote_flat(self, work: Callable[[], tuple[Crcs, bytes]], decide: Callable[[Crcs, list[bytes]], bytes]) -> bytes:
        def encode(hashed: tuple[Crcs, bytes]) -> bytes:
            return msgspec.msgpack.encode(_Report(self.codec.encode(hashed[0]), hashed[1]))

        def decide_on_reports(posted: list[bytes]) -> bytes:
            reports = [msgspec.msgpack.decode(raw, type=_Report) for raw in posted]
            crcs = self.codec.decode(report.crcs for report in reports)
            return decide(crcs, [report.payload for report in reports])

        return self.session.vote(self.phase, work, encode, decide_on_reports)[1]

    def _vote_in_buckets(
        self,
        reports: StoredReports,
        work: Callable[[], tuple[Crcs, bytes]],
        decide: Callable[[Crcs, list[bytes]], bytes],
    ) -> bytes:
        payloads = list[bytes]()

        def work_and_report() -> bytes:
            crcs, payload = work()
            return reports.publish(self._pack(self.codec.encode(crcs))) + payload

        def collect(posted: list[bytes]) -> bytes:
            payloads.extend(outcome[1:] for outcome in posted)
            return reports.check_hosts([outcome[:1] for outcome in posted])

        try:
            _, lost = self.session.vote(self.phase, work_and_report, bytes, collect)
            if lost:
                self.session.run_on_all("reporting CRCs", reports.publish_own)
            _, decision = self.session.vote(
                "gathering CRCs",
                reports.merge_bucket,
                bytes,
                lambda posted: decide(self.codec.decode(self._unpack(posted)), payloads),
            )
        finally:
            reports.delete()
        return decision


class StoredReports:
    """The reports in the store, of hosts or of ranks, and the bucket that this rank merges if it is the first of one.

    ``merge`` merges packed CRCs. Each rank has one in a vote on CRCs.
    """

    def __init__(
        self,
        session: Session,
        store: DeadlineStore,
        phase: str,
        rank_order: Sequence[int],
        merge: Callable[[Iterable[bytes]], bytes],
    ) -> None:
        self._session, self._store, self._merge, self._rank_order = session, store, merge, rank_order
        self._prefix = f"hashed/{phase}/{session.vote_number + 1}"
        #: The messages within the host, and whether hosts report, not ranks.
        self._messages: HostMessages | None = None
        self._is_by_host = False
        self._report, self._stored = b"", list[str]()

    def publish(self, report: bytes) -> bytes:
        """Store the CRCs of this rank, or leave them to the last rank of the host.

        Return which of the two happened.

        Called in the work of the first vote.
        """
        self._report = report
        self._messages = self._session.open_host_messages("hashed")
        self._is_by_host = self._messages is not None
        if self._messages is None:
            self.publish_own()
            return _STORED
        messages = self._messages.post(report)
        if not messages:
            return _POSTED
        self._set(f"host/{self._messages.host}", self._merge(messages))
        return _STORED

    def publish_own(self) -> None:
        """Store the CRCs of this rank.

        All ranks call it if a message within a host was lost.
        """
        self._is_by_host = False
        self._set(str(self._session.rank), self._report)

    def _set(self, name: str, report: bytes) -> None:
        with translate_store_errors("reporting CRCs"):
            self._store.set(self._key(name), report)
        self._stored.append(self._key(name))

    def check_hosts(self, published: Sequence[bytes]) -> bytes:
        """Return the decision: whether the reports of a host are missing, given the state of each rank's report."""
        hosts = self._session.hosts
        if hosts is None or not hosts.can_combine:
            return b""
        complete = {host for host, outcome in zip(hosts.host_of, published, strict=True) if outcome == _STORED}
        return b"" if len(complete) == len(hosts.ranks_of) else _LOST

    def merge_bucket(self) -> bytes:
        """Return the merged CRCs of a bucket on its first rank, nothing on other ranks.

        All reports of the bucket are in the store by now.
        """
        names = self._names_of_bucket()
        if not names:
            return b""
        keys = list(map(self._key, names))
        with translate_store_errors("gathering CRCs"):
            if not self._store.check(keys):
                raise RankTimeoutError("this rank came too late: other ranks have stopped waiting for it")
            reports = self._store.get(*keys)
        return self._merge(reports)

    def _names_of_bucket(self) -> list[str]:
        """Return the names of the reports that this rank merges."""
        hosts, rank = self._session.hosts, self._session.rank
        if hosts is None or not self._is_by_host:
            bucket = bucket_of(rank, self._rank_order)
            return list(map(str, bucket)) if bucket[0] == rank else []
        first_ranks = first_ranks_of_hosts(hosts.host_of, self._rank_order)
        if first_ranks[hosts.host_of[rank]] != rank:
            return []
        bucket = bucket_of(hosts.host_of[rank], list(first_ranks))
        return [f"host/{host}" for host in bucket] if bucket[0] == hosts.host_of[rank] else []

    def delete(self) -> None:
        """Delete the reports and messages that this rank has stored and posted."""
        self._store.delete_keys(*self._stored)
        if self._messages is not None:
            self._messages.withdraw()

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"


def first_ranks_of_hosts(host_of: Sequence[int], rank_order: Sequence[int]) -> dict[int, int]:
    """Return the first rank of each host in an order of all ranks, in this order."""
    first_ranks: dict[int, int] = {}
    for rank in rank_order:
        first_ranks.setdefault(host_of[rank], rank)
    return first_ranks
