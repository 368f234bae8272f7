"""How the ranks of a job decide things together, with a deadline, and fail together.

One primitive: each rank does a piece of work that may fail and posts its outcome, rank 0 looks at all
outcomes and decides, and every rank gets the decision or raises the same error. It runs over the key-value
store of the default process group: no collective, any backend, and a rank that does not come is named. Nothing
ever blocks inside the store: that would hold up whatever else in this process uses the same connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import msgspec
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from holdfast import errors
from holdfast.errors import (
    AbandonedError,
    DisagreementError,
    HoldfastError,
    InvalidArgumentError,
    RankFailedError,
    RankTimeoutError,
)

#: Rank 0 decides for all.
LEADER = 0

#: Seconds that the others wait beyond the deadline for the leader's word.
_GRACE = 1.0

#: Seconds between looks at the store: a twentieth of what was waited already, within these bounds.
_SHORTEST_NAP, _LONGEST_NAP = 0.0005, 0.25

#: Most ranks that a message lists.
_SHOWN = 8

T = TypeVar("T")

#: Rank 0's decision over what all ranks posted.
Decide = Callable[[list[bytes]], bytes]


class Failure(msgspec.Struct, frozen=True):
    """An error on its way to the other ranks: the name of its type in :mod:`holdfast.errors`, and its message."""

    kind: str
    message: str
    errno: int | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe an error; those that are not ours become ``RankFailedError``."""
        if isinstance(error, HoldfastError):
            number = error.errno if isinstance(error, OSError) else None
            return cls(type(error).__name__, _plain(error.args[-1] if error.args else ""), number)
        return cls(RankFailedError.__name__, f"{type(error).__name__}: {_plain(error)}")

    def rebuild(self) -> HoldfastError:
        """The error again, on whichever rank."""
        kind: type[HoldfastError] = getattr(errors, self.kind)
        return kind(self.message) if self.errno is None else kind(self.errno, self.message)


class _Outcome(msgspec.Struct, frozen=True):
    payload: bytes = b""
    failure: Failure | None = None


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(_Outcome).decode


class Ranks:
    """The ranks of a process group, and which of them this process is; alone when there is no group."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.group = current_group(process_group)
        self.rank, self.size = 0, 1
        self._store: Store | None = None
        self._gloo: dist.ProcessGroup | None = None
        if self.group is not None and dist.get_rank(self.group) < 0:
            raise InvalidArgumentError(
                "this rank is not in the process group that was passed; only its members save and load"
            )
        if self.group is not None and dist.get_world_size(self.group) > 1:
            self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
            self._store = PrefixStore(f"holdfast/{self.group.group_name}", _get_default_store())

    def global_ranks(self) -> list[int]:
        """The global rank of each rank of the group."""
        return [0] if self.group is None else dist.get_process_group_ranks(self.group)

    def session(self, timeout: float) -> Session:
        """A conversation about one save or load. The n-th session of each rank is the same conversation."""
        if self._store is None:
            return Session(None, 0, 1, timeout)
        number = self._store.add(f"sessions/{self.rank}", 1)
        return Session(PrefixStore(str(number), self._store), self.rank, self.size, timeout, number)

    def gloo(self) -> dist.ProcessGroup:
        """A group that moves CPU memory between these ranks: the group itself if it can, else one made once, by all."""
        if self.group is None:
            raise InvalidArgumentError("there is no process group, and nothing to exchange")
        if self._gloo is None:
            able = "cpu:gloo" in str(dist.get_backend_config(self.group))
            self._gloo = self.group if able else _gloo_beside(self.global_ranks())
        return self._gloo


def current_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group given, else the default one, else ``None``."""
    if process_group is not None or not (dist.is_available() and dist.is_initialized()):
        return process_group
    return dist.group.WORLD


def _gloo_beside(global_ranks: list[int]) -> dist.ProcessGroup:
    made = dist.new_group(global_ranks, backend="gloo", use_local_synchronization=True)
    if not isinstance(made, dist.ProcessGroup):
        raise InvalidArgumentError("this rank is not in the process group that was passed")
    return made


class Session:
    """The votes of one save or load, in an order that is the same on every rank. ``number`` tells it from others."""

    def __init__(self, store: Store | None, rank: int, size: int, timeout: float, number: int = 0) -> None:
        self.rank, self.size, self.timeout, self.number = rank, size, timeout, number
        self._store, self._votes = store, 0

    def vote(self, phase: str, work: Callable[[], T], encode: Callable[[T], bytes], decide: Decide) -> tuple[T, bytes]:
        """Do ``work`` here; ``decide`` on rank 0 over what all ranks' work gave; return both results.

        An error in anybody's work, or in the decision, is raised by every rank, naming the ranks it
        happened on. Raises ``RankTimeoutError`` naming ranks that did not come within the timeout.
        """
        if self._store is None:
            result = work()
            return result, decide([encode(result)])
        return self._vote(self._store, phase, work, encode, decide)

    def _vote(
        self,
        store: Store,
        phase: str,
        work: Callable[[], T],
        encode: Callable[[T], bytes],
        decide: Decide,
    ) -> tuple[T, bytes]:
        self._votes += 1
        ballot = _Ballot(store, self._votes, self.size, phase)
        result, mine, error = _attempt(work, encode)
        with _store_alive(phase):
            ballot.post(self.rank, mine)
            lead = ballot.collect_and_decide if self.rank == LEADER else ballot.follow
            # Who has waited in vain for others already need not wait as long again.
            decision = lead(_GRACE if isinstance(error, RankTimeoutError) else self.timeout, decide)
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise error
        if decision.failure is not None:
            raise decision.failure.rebuild() from error
        if result is None:
            raise RankFailedError(f"rank {self.rank} lost its own result while {phase}") from error
        return result[0], decision.payload

    def check_others(self) -> None:
        """Inside the work of a vote that ranks do together: raise ``AbandonedError`` where another has failed at it."""
        if self._store is not None and self._store.check([_failed(self._votes)]):
            raise AbandonedError("another rank failed at what all do together")

    def all(self, phase: str, work: Callable[[], T]) -> T:
        """Do ``work`` on every rank; all succeed, or all raise the same error."""
        return self.vote(phase, work, lambda _: b"", lambda _: b"")[0]


def _attempt(
    work: Callable[[], T], encode: Callable[[T], bytes]
) -> tuple[tuple[T] | None, _Outcome, BaseException | None]:
    try:
        result = work()
        return (result,), _Outcome(encode(result)), None
    except BaseException as error:  # noqa: BLE001 - the other ranks must hear of it, whatever it is
        return None, _Outcome(failure=Failure.of(error)), error


@contextmanager
def _store_alive(phase: str) -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        raise RankFailedError(
            f"the ranks' key-value store was lost while {phase}; it lives in rank {LEADER}'s process: {error}"
        ) from error


class _Ballot:
    """The keys of one vote in the store."""

    def __init__(self, store: Store, number: int, size: int, phase: str) -> None:
        self._store, self._number, self._phase = store, number, phase
        self._keys = [f"{number}/{rank}" for rank in range(size)]

    def post(self, rank: int, outcome: _Outcome) -> None:
        self._store.set(self._keys[rank], _pack(outcome))  # type: ignore[arg-type]
        if outcome.failure is not None:
            self._store.set(_failed(self._number), "")

    def collect_and_decide(self, timeout: float, decide: Decide) -> _Outcome:
        """Collect what all ranks posted, decide, and publish the decision, whatever happens meanwhile."""
        decision = _Outcome(
            failure=Failure(RankFailedError.__name__, f"rank {LEADER} was interrupted while {self._phase}")
        )
        try:
            decision = self._decide(timeout, decide)
        finally:
            self._store.set(self._decision(self._number), _pack(decision))  # type: ignore[arg-type]
        return decision

    def _decide(self, timeout: float, decide: Decide) -> _Outcome:
        try:
            self._wait(self._keys, timeout)
        except RankTimeoutError as error:
            return _Outcome(failure=Failure.of(error))
        self._store.set(self._collected, "")
        outcomes = [_unpack(raw) for raw in self._store.multi_get(self._keys)]
        self._forget()
        return _decide(outcomes, decide, self._phase)

    def follow(self, timeout: float, _: Decide) -> _Outcome:
        """Wait until all ranks have posted, and then for the decision: a commit may take its time, too."""
        key = self._decision(self._number)
        self._wait([self._collected], timeout + _GRACE, or_else=key)
        self._wait([key], timeout + _GRACE)
        return _unpack(self._store.get(key))

    def _forget(self) -> None:
        # Everybody who posted to this vote has read the decision of the one before.
        before = self._number - 1
        for key in (*self._keys, self._decision(before), f"{before}/collected", _failed(before)):
            self._store.delete_key(key)

    @staticmethod
    def _decision(number: int) -> str:
        return f"{number}/decision"

    @property
    def _collected(self) -> str:
        return f"{self._number}/collected"

    def _wait(self, keys: list[str], timeout: float, or_else: str | None = None) -> None:
        """Until all keys are there, or the one ``or_else``. Raises ``RankTimeoutError``."""
        started = time.monotonic()
        while not self._store.check(keys) and not (or_else and self._store.check([or_else])):
            waited = time.monotonic() - started
            if waited > timeout:
                raise RankTimeoutError(self._absent())
            time.sleep(min(_LONGEST_NAP, max(_SHORTEST_NAP, waited / 20)))

    def _absent(self) -> str:
        all_came = self._store.check([self._collected])
        absent = [] if all_came else [rank for rank, key in enumerate(self._keys) if not self._store.check([key])]
        names = _names(absent) if absent else f"rank {LEADER}"
        return (
            f"{names} did not come within the timeout while {self._phase}; "
            "it is stuck or dead, or does not make the same calls in the same order"
        )


def _failed(vote: int) -> str:
    return f"{vote}/failed"


def _decide(outcomes: Sequence[_Outcome], decide: Decide, phase: str) -> _Outcome:
    failed = [(rank, outcome.failure) for rank, outcome in enumerate(outcomes) if outcome.failure is not None]
    if failed:
        return _Outcome(failure=_blame(failed, len(outcomes), phase))
    try:
        return _Outcome(decide([outcome.payload for outcome in outcomes]))
    except Exception as error:  # noqa: BLE001 - raised again by every rank
        return _Outcome(failure=Failure.of(error))


def _blame(failed: list[tuple[int, Failure]], size: int, phase: str) -> Failure:
    """One failure for all: the first, with the ranks that it happened on; that of a rank that gave up comes last."""
    causes = [item for item in failed if item[1].kind != AbandonedError.__name__]
    failed = causes or failed
    first = failed[0][1]
    same = [rank for rank, failure in failed if failure == first]
    if len(same) == size:
        return first
    message = f"{_names(same)} of {size}, {phase}: {first.message}"
    others = [rank for rank, failure in failed if failure != first]
    if others:
        message += f" ({_names(others)} failed too, otherwise)"
    return Failure(first.kind, message, first.errno)


def _names(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(str(rank) for rank in ranks[:_SHOWN])
    return f"ranks {shown}" + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")


def _plain(message: object) -> str:
    """A message in whole characters: file names may have others."""
    return str(message).encode(errors="backslashreplace").decode()


def unanimous(what: str, said: Sequence[str]) -> str:
    """What all ranks said of one thing. Raises ``DisagreementError`` naming both sides."""
    for rank, word in enumerate(said):
        if word != said[0]:
            raise DisagreementError(f"ranks disagree about {what}: rank 0 has {said[0]}, rank {rank} has {word}")
    return said[0]
