"""One vote over a key-value store: every rank posts an outcome, rank 0 decides, every rank learns the decision.

Nobody waits inside the store: that would hold up whatever else in this process uses the same connection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from holdfast import errors
from holdfast.engine.comm.polling import poll_until
from holdfast.engine.comm.store import DeadlineStore
from holdfast.errors import HoldfastError, PeerFailedError, RankFailedError, RankTimeoutError

#: Rank 0 decides for all.
COORDINATOR_RANK = 0

#: Seconds that the others wait beyond the deadline for the leader's word.
GRACE_SECONDS = 0.5

#: Up to so many ranks each of them looks for itself which others have not come.
_FEW = 64

#: Most ranks that a message lists.
_SHOWN = 8

#: Rank 0's decision over what all ranks posted.
Decide = Callable[[list[bytes]], bytes]


class RankFailure(msgspec.Struct, frozen=True):
    """An error on its way to the other ranks: the name of its type in :mod:`holdfast.errors`, and its message."""

    kind: str
    message: str
    errno: int | None = None

    @classmethod
    def of(cls, error: BaseException) -> RankFailure:
        """Describe an error; those that are not ours become ``RankFailedError``."""
        if isinstance(error, HoldfastError):
            number = error.errno if isinstance(error, OSError) else None
            return cls(_public_type(error).__name__, _printable(error.args[-1] if error.args else ""), number)
        return cls(RankFailedError.__name__, f"{type(error).__name__}: {_printable(error)}")

    def rebuild(self) -> HoldfastError:
        """The error again, on whichever rank."""
        kind: type[HoldfastError] = getattr(errors, self.kind)
        return kind(self.message) if self.errno is None else kind(self.errno, self.message)


def _public_type(error: HoldfastError) -> type[HoldfastError]:
    """Return the type that other ranks know: modules may have narrower ones of their own."""
    public = vars(errors).values()
    return next(kind for kind in type(error).__mro__ if issubclass(kind, HoldfastError) and kind in public)


class VoteOutcome(msgspec.Struct, frozen=True):
    """What a rank's work gave, or how it failed."""

    payload: bytes = b""
    failure: RankFailure | None = None


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(VoteOutcome).decode


class VoteRound:
    """The keys of one vote in the store."""

    def __init__(self, store: DeadlineStore, number: int, size: int, phase: str) -> None:
        self._store, self._number, self.phase = store, number, phase
        self._keys = [f"{number}/{rank}" for rank in range(size)]

    def post(self, rank: int, outcome: VoteOutcome) -> None:
        """Let the others know a rank's outcome."""
        self._store.set(self._keys[rank], _pack(outcome))
        if outcome.failure is not None:
            self._store.set(failed_key(self._number), outcome.failure.kind.encode())

    def collect_and_decide(self, timeout: float, decide: Decide) -> VoteOutcome:
        """Collect what all ranks posted, decide, and publish the decision, whatever happens meanwhile."""
        decision = VoteOutcome(
            failure=RankFailure(RankFailedError.__name__, f"rank {COORDINATOR_RANK} was interrupted while {self.phase}")
        )
        try:
            decision = self._decide(timeout, decide)
        finally:
            self._store.set(self._decision(self._number), _pack(decision))
        self._forget()
        return decision

    def _decide(self, timeout: float, decide: Decide) -> VoteOutcome:
        try:
            self._wait(self._keys, timeout, missing=self._missing)
        except RankTimeoutError as error:
            return VoteOutcome(failure=RankFailure.of(error))
        self._store.set(self._collected)
        outcomes = [_unpack(raw) for raw in self._store.get(*self._keys)]
        if self._store.check([self._given_up]):
            late = f"rank {COORDINATOR_RANK} came too late while {self.phase}: others have given up waiting for it"
            return VoteOutcome(failure=RankFailure(RankTimeoutError.__name__, late))
        return _merge_votes(outcomes, decide, self.phase)

    def follow(self, timeout: float, _: Decide) -> VoteOutcome:
        """Wait until all ranks have posted, and then for the decision: a commit may take its time, too."""
        key = self._decision(self._number)
        try:
            missing = self._missing if len(self._keys) <= _FEW else self._missing_leader
            self._wait([self._collected], timeout + GRACE_SECONDS, or_else=key, missing=missing)
            self._wait([key], timeout + GRACE_SECONDS, missing=self._missing_leader)
        except RankTimeoutError:
            self._store.set(self._given_up)
            raise
        (decision,) = self._store.get(key)
        return _unpack(decision)

    def _forget(self) -> None:
        # Everybody who posted to this vote has read the decision of the one before.
        before = self._number - 1
        self._store.forget(*self._keys, self._decision(before), f"{before}/collected", failed_key(before))

    @staticmethod
    def _decision(number: int) -> str:
        return f"{number}/decision"

    @property
    def _collected(self) -> str:
        return f"{self._number}/collected"

    @property
    def _given_up(self) -> str:
        """There once a rank has given up waiting: it has raised already, so nothing may be committed."""
        return f"{self._number}/given up"

    def _wait(self, keys: list[str], timeout: float, or_else: str | None = None, *, missing: Callable[[], str]) -> None:
        """Until all keys are there, or the one ``or_else``. Raises ``RankTimeoutError``."""

        def there() -> bool:
            return self._store.check(keys) or bool(or_else and self._store.check([or_else]))

        if not poll_until(there, timeout, missing):
            raise RankTimeoutError(self._absent())

    def _absent(self) -> str:
        return (
            f"{self._absent_names()} did not come within the timeout while {self.phase}; "
            "it is stuck or dead, or does not make the same calls in the same order"
        )

    def _absent_names(self) -> str:
        """The ranks that have not posted; if all have, rank 0 has yet to decide."""
        all_came = self._store.check([self._collected])
        absent = [] if all_came else [rank for rank, key in enumerate(self._keys) if not self._store.check([key])]
        return format_ranks(absent) if absent else f"rank {COORDINATOR_RANK}"

    def _missing(self) -> str:
        return f"{self._absent_names()} while {self.phase}"

    def _missing_leader(self) -> str:
        """The same without a look at the keys of many ranks, which as many would take."""
        late = self._store.check([self._keys[COORDINATOR_RANK]]) and not self._store.check([self._collected])
        return f"{'other ranks' if late else f'rank {COORDINATOR_RANK}'} while {self.phase}"


def failed_key(vote: int) -> str:
    """The key that is there once any rank has failed in a vote, with the name of its error's type."""
    return f"{vote}/failed"


def _merge_votes(outcomes: Sequence[VoteOutcome], decide: Decide, phase: str) -> VoteOutcome:
    failed = [(rank, outcome.failure) for rank, outcome in enumerate(outcomes) if outcome.failure is not None]
    if failed:
        return VoteOutcome(failure=_merge_failures(failed, len(outcomes), phase))
    try:
        return VoteOutcome(decide([outcome.payload for outcome in outcomes]))
    except Exception as error:  # noqa: BLE001 - raised again by every rank
        return VoteOutcome(failure=RankFailure.of(error))


def _merge_failures(failed: list[tuple[int, RankFailure]], size: int, phase: str) -> RankFailure:
    """One failure for all: the first, with the ranks that it happened on; that of a rank that gave up comes last."""
    causes = [item for item in failed if item[1].kind != PeerFailedError.__name__]
    failed = causes or failed
    first = failed[0][1]
    same = [rank for rank, failure in failed if failure == first]
    if len(same) == size:
        return first
    message = f"{format_ranks(same)} of {size}, {phase}: {first.message}"
    others = [rank for rank, failure in failed if failure != first]
    if others:
        message += f" ({format_ranks(others)} failed too, otherwise)"
    return RankFailure(first.kind, message, first.errno)


def format_ranks(ranks: Sequence[int]) -> str:
    """Ranks, for people."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(str(rank) for rank in ranks[:_SHOWN])
    return f"ranks {shown}" + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")


def _printable(message: object) -> str:
    """A message in whole characters: file names may have others."""
    return str(message).encode(errors="backslashreplace").decode()
