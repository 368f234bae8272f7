"""Gathering of the CRCs of all ranks on rank 0: in one step, or in two steps if there are many ranks.

Ranks are put into buckets in an order in which ranks with adjacent bytes are neighbours (see
:mod:`rankless.engine.plan.rank_order`). The first rank of a bucket merges the CRCs of the bucket, and rank 0
receives about as much from each bucket as from one rank. No rank waits for another here: a vote after which all have
reported comes first, and names the ranks that have not.

The votes on the writing of saves, drains, components and conversions, and the votes of incremental saves, go through
here. With more than :data:`MAX_FLAT_RANKS` ranks the decision of rank 0, such as the commit, runs in the second vote,
"gathering CRCs". No rank may read the report of another before the first vote has ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from rankless.engine.comm.job_store import DeadlineStore
from rankless.engine.comm.session import Session, translate_store_errors
from rankless.engine.integrity.block_sums import BlockSums
from rankless.engine.integrity.fragments import (
    FragmentTable,
    decode_fragments,
    encode_fragments,
    merge_adjacent_fragments,
)
from rankless.engine.io.requests import Fragments
from rankless.errors import RankTimeoutError
from rankless.process.prepared_types import prepared

#: The most ranks that report to rank 0 directly.
MAX_FLAT_RANKS = 64


class HashedResult(NamedTuple):
    """The result of a rank's work: its fragments, and a payload for rank 0."""

    fragments: Fragments
    payload: bytes = b""


#: Makes rank 0's decision over the merged fragments of all ranks, and the payload of each.
DecideHashed = Callable[[Fragments, list[bytes]], bytes]

#: CRCs of what a rank has hashed, in some form.
Crcs = TypeVar("Crcs")


class _CrcCodec(Protocol[Crcs]):
    """A way to encode CRCs, to merge the encoded ones of several ranks, and to decode those of all."""

    def encode(self, crcs: Crcs, /) -> bytes: ...

    def merge(self, reports: Iterable[bytes], /) -> bytes: ...

    def decode(self, reports: Iterable[bytes], /) -> Crcs: ...


class _FragmentCodec:
    def encode(self, crcs: Fragments) -> bytes:
        return encode_fragments(crcs)

    def merge(self, reports: Iterable[bytes]) -> bytes:
        return merge_adjacent_fragments(FragmentTable.from_bytes(reports)).to_bytes()

    def decode(self, reports: Iterable[bytes]) -> Fragments:
        return decode_fragments(reports)


class _SumCodec:
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

    def work_and_unpack() -> tuple[Fragments, bytes]:
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
    """A vote in which ranks report CRCs."""

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
        bucket = _RankBucket(session.rank, rank_order or range(session.size), session.store, self.phase)
        return self._vote_in_buckets(bucket, work, decide)

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
        bucket: _RankBucket,
        work: Callable[[], tuple[Crcs, bytes]],
        decide: Callable[[Crcs, list[bytes]], bytes],
    ) -> bytes:
        payloads = list[bytes]()

        def work_and_report() -> bytes:
            crcs, payload = work()
            bucket.publish_report(self.codec.encode(crcs))
            return payload

        def collect(posted: list[bytes]) -> bytes:
            payloads.extend(posted)
            return b""

        try:
            self.session.vote(self.phase, work_and_report, lambda payload: payload, collect)
            _, decision = self.session.vote(
                "gathering CRCs",
                lambda: bucket.merge_reports(self.codec.merge),
                lambda merged: merged,
                lambda posted: decide(self.codec.decode(posted), payloads),
            )
        finally:
            bucket.delete_report()
        return decision


class _RankBucket:
    """A rank and its neighbours in an order of all ranks; the first of them merges the CRCs of all."""

    def __init__(self, rank: int, rank_order: Sequence[int], store: DeadlineStore, phase: str) -> None:
        ranks = bucket_of(rank, rank_order)
        self._is_leader = rank == ranks[0]
        self._key, self._store = _report_key(phase, rank), store
        self._bucket_keys = [_report_key(phase, other) for other in ranks]

    def publish_report(self, report: bytes) -> None:
        """Store the CRCs of this rank for the leader of the bucket."""
        with translate_store_errors("reporting CRCs"):
            self._store.set(self._key, report)

    def merge_reports(self, merge: Callable[[Iterable[bytes]], bytes]) -> bytes:
        """Return the merged CRCs of the bucket on its leader, nothing on other ranks.

        All ranks of the bucket have reported by now.
        """
        if not self._is_leader:
            return b""
        with translate_store_errors("gathering CRCs"):
            if not self._store.check(self._bucket_keys):
                raise RankTimeoutError("this rank came too late: other ranks have stopped waiting for it")
            reports = self._store.get(*self._bucket_keys)
        return merge(reports)

    def delete_report(self) -> None:
        """Delete the stored CRCs of this rank."""
        self._store.delete_keys(self._key)


def _report_key(phase: str, rank: int) -> str:
    return f"hashed/{phase}/{rank}"
