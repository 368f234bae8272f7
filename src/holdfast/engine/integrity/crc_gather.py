"""What all ranks have hashed on its way to rank 0: told to it by each, or, where ranks are many, by way of groups.

Neighbours in rank are mostly neighbours in the tensors. So the first rank of a group folds what the group has hashed,
and rank 0 gets about as much from each group as from one rank. Nobody waits for another inside of this: a vote that
all have written comes first, and names who has not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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

#: Most ranks that tell rank 0 each for itself.
MAX_FLAT_RANKS = 64


class HashedResult(NamedTuple):
    """What a rank's work gave: what it hashed, and what else rank 0 is to know."""

    fragments: Fragments
    own: bytes = b""


#: Rank 0's decision over the folded fragments of all ranks, and what else each of them told.
DecideHashed = Callable[[Fragments, list[bytes]], bytes]


def vote_with_fragments(session: Session, phase: str, work: Callable[[], HashedResult], decide: DecideHashed) -> bytes:
    """Do ``work`` on every rank, and return what rank 0 decides over all that was hashed; as ``Session.vote``.

    Once in a session.
    """
    if session.store is None or session.size <= MAX_FLAT_RANKS:
        return _directly(session, phase, work, decide)
    return _by_groups(session, session.store, phase, work, decide)


def bucket_size(size: int) -> int:
    """How many of so many ranks make a group: about as many as there are groups."""
    return math.isqrt(size - 1) + 1


class _Report(msgspec.Struct, frozen=True):
    """What a rank tells rank 0."""

    fragments: bytes
    own: bytes


def _directly(session: Session, phase: str, work: Callable[[], HashedResult], decide: DecideHashed) -> bytes:
    def encode(hashed: HashedResult) -> bytes:
        return msgspec.msgpack.encode(_Report(encode_fragments(hashed.fragments), hashed.own))

    def decide_over(posted: list[bytes]) -> bytes:
        reports = [msgspec.msgpack.decode(raw, type=_Report) for raw in posted]
        return decide(decode_fragments(report.fragments for report in reports), [report.own for report in reports])

    return session.vote(phase, work, encode, decide_over)[1]


def _by_groups(
    session: Session, store: DeadlineStore, phase: str, work: Callable[[], HashedResult], decide: DecideHashed
) -> bytes:
    group, said = _RankBucket(session, store), list[bytes]()

    def tell() -> bytes:
        hashed = work()
        group.tell(encode_fragments(hashed.fragments))
        return hashed.own

    def collect(posted: list[bytes]) -> bytes:
        said.extend(posted)
        return b""

    try:
        session.vote(phase, tell, lambda own: own, collect)
        _, decision = session.vote(
            "gathering CRCs",
            group.folded,
            lambda folded: folded,
            lambda posted: decide(decode_fragments(posted), said),
        )
    finally:
        group.forget()
    return decision


class _RankBucket:
    """The neighbours of a rank, the first of which folds for all of them."""

    def __init__(self, session: Session, store: DeadlineStore) -> None:
        many = bucket_size(session.size)
        leader = session.rank - session.rank % many
        self._is_leader = session.rank == leader
        self._own, self._store = _key(session.rank), store
        self._all = [_key(rank) for rank in range(leader, min(leader + many, session.size))]

    def tell(self, report: bytes) -> None:
        """Let the group's leader know what this rank hashed."""
        with translate_store_errors("telling what was hashed"):
            self._store.set(self._own, report)

    def folded(self) -> bytes:
        """On the leader what the group hashed, all of which it has been told by now; nothing on others."""
        if not self._is_leader:
            return b""
        with translate_store_errors("gathering what was hashed"):
            if not self._store.check(self._all):
                raise RankTimeoutError("this rank came too late: others have given up waiting for it")
            reports = self._store.get(*self._all)
        return merge_adjacent_fragments(FragmentTable.told(reports)).report()

    def forget(self) -> None:
        """Nobody needs to know any more."""
        self._store.forget(self._own)


def _key(rank: int) -> str:
    return f"hashed/{rank}"
