"""Gathering of the fragments of all ranks on rank 0: in one step, or in two steps if there are many ranks.

Ranks are put into buckets in an order in which ranks with adjacent bytes are neighbours (see
:mod:`holdfast.engine.plan.rank_order`). The first rank of a bucket merges the fragments of the bucket, and rank 0
receives about as much from each bucket as from one rank. No rank waits for another here: a vote after which all have
reported comes first, and names the ranks that have not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from holdfast.engine.comm.session import Session, translate_store_errors
from holdfast.engine.comm.store import DeadlineStore
from holdfast.engine.integrity.fragments import (
    FragmentTable,
    decode_fragments,
    encode_fragments,
    merge_adjacent_fragments,
)
from holdfast.engine.io.requests import Fragments
from holdfast.errors import RankTimeoutError

#: The most ranks that report to rank 0 directly.
MAX_FLAT_RANKS = 64


class HashedResult(NamedTuple):
    """The result of a rank's work: its fragments, and a payload for rank 0."""

    fragments: Fragments
    payload: bytes = b""


#: Makes rank 0's decision over the merged fragments of all ranks, and the payload of each.
DecideHashed = Callable[[Fragments, list[bytes]], bytes]


def vote_with_fragments(
    session: Session,
    phase: str,
    work: Callable[[], HashedResult],
    decide: DecideHashed,
    rank_order: Sequence[int] = (),
) -> bytes:
    """Do ``work`` on every rank, and return rank 0's decision over all fragments, like ``Session.vote``.

    ``rank_order`` has all ranks, those with adjacent bytes next to each other; by default they are in ascending order.
    It must be the same on all ranks. Only once in a session.
    """
    if session.store is None or session.size <= MAX_FLAT_RANKS:
        return _vote_flat(session, phase, work, decide)
    bucket = _RankBucket(session.rank, rank_order or range(session.size), session.store)
    return _vote_in_buckets(session, bucket, phase, work, decide)


def bucket_size(size: int) -> int:
    """Return the number of ranks in a bucket: about the number of buckets."""
    return math.isqrt(size - 1) + 1


def bucket_of(rank: int, rank_order: Sequence[int]) -> Sequence[int]:
    """Return the ranks of the bucket of a rank. The first of them merges the fragments of all."""
    ranks_per_bucket, place = bucket_size(len(rank_order)), rank_order.index(rank)
    first = place - place % ranks_per_bucket
    return rank_order[first : first + ranks_per_bucket]


class _Report(msgspec.Struct, frozen=True):
    """The message of a rank to rank 0."""

    fragments: bytes
    payload: bytes


def _vote_flat(session: Session, phase: str, work: Callable[[], HashedResult], decide: DecideHashed) -> bytes:
    def encode(hashed: HashedResult) -> bytes:
        return msgspec.msgpack.encode(_Report(encode_fragments(hashed.fragments), hashed.payload))

    def decide_on_reports(posted: list[bytes]) -> bytes:
        reports = [msgspec.msgpack.decode(raw, type=_Report) for raw in posted]
        return decide(decode_fragments(report.fragments for report in reports), [report.payload for report in reports])

    return session.vote(phase, work, encode, decide_on_reports)[1]


def _vote_in_buckets(
    session: Session, bucket: _RankBucket, phase: str, work: Callable[[], HashedResult], decide: DecideHashed
) -> bytes:
    payloads = list[bytes]()

    def work_and_report() -> bytes:
        hashed = work()
        bucket.publish_report(encode_fragments(hashed.fragments))
        return hashed.payload

    def collect(posted: list[bytes]) -> bytes:
        payloads.extend(posted)
        return b""

    try:
        session.vote(phase, work_and_report, lambda payload: payload, collect)
        _, decision = session.vote(
            "gathering CRCs",
            bucket.merge_reports,
            lambda merged: merged,
            lambda posted: decide(decode_fragments(posted), payloads),
        )
    finally:
        bucket.delete_report()
    return decision


class _RankBucket:
    """A rank and its neighbours in an order of all ranks; the first of them merges the fragments of all."""

    def __init__(self, rank: int, rank_order: Sequence[int], store: DeadlineStore) -> None:
        ranks = bucket_of(rank, rank_order)
        self._is_leader = rank == ranks[0]
        self._key, self._store = _report_key(rank), store
        self._bucket_keys = list(map(_report_key, ranks))

    def publish_report(self, report: bytes) -> None:
        """Store the fragments of this rank for the leader of the bucket."""
        with translate_store_errors("reporting CRCs"):
            self._store.set(self._key, report)

    def merge_reports(self) -> bytes:
        """Return the merged fragments of the bucket on its leader, nothing on other ranks.

        All ranks of the bucket have reported by now.
        """
        if not self._is_leader:
            return b""
        with translate_store_errors("gathering CRCs"):
            if not self._store.check(self._bucket_keys):
                raise RankTimeoutError("this rank came too late: other ranks have stopped waiting for it")
            reports = self._store.get(*self._bucket_keys)
        return merge_adjacent_fragments(FragmentTable.from_bytes(reports)).to_bytes()

    def delete_report(self) -> None:
        """Delete the stored fragments of this rank."""
        self._store.delete_keys(self._key)


def _report_key(rank: int) -> str:
    return f"hashed/{rank}"
