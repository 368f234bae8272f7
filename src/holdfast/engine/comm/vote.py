"""One vote over a key-value store: every rank posts an outcome, rank 0 decides, every rank reads the decision.

Ranks poll the store instead of blocking in it: that would stall every other user of the same connection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from holdfast import errors
from holdfast.engine.comm.polling import poll_until
from holdfast.engine.comm.store import DeadlineStore
from holdfast.errors import HoldfastError, PeerFailedError, RankFailedError, RankTimeoutError

#: The rank that decides for all.
COORDINATOR_RANK = 0

#: Seconds that other ranks wait beyond the deadline for the coordinator's decision.
GRACE_SECONDS = 0.5

#: With more ranks than this, ranks other than the coordinator do not poll which ranks are missing.
_FEW = 64

#: Most ranks that a message lists.
_SHOWN = 8

#: Makes rank 0's decision over the results of all ranks.
Decide = Callable[[list[bytes]], bytes]


class RankFailure(msgspec.Struct, frozen=True):
    """An error to send to the other ranks: the name of its type in :mod:`holdfast.errors`, and its message."""

    kind: str
    message: str
    errno: int | None = None

    @classmethod
    def from_error(cls, error: BaseException) -> RankFailure:
        """Describe an error; an error of another package becomes ``RankFailedError``."""
        if isinstance(error, HoldfastError):
            number = error.errno if isinstance(error, OSError) else None
            return cls(_public_type(error).__name__, _to_printable(error.args[-1] if error.args else ""), number)
        return cls(RankFailedError.__name__, f"{type(error).__name__}: {_to_printable(error)}")

    def to_error(self) -> HoldfastError:
        """Rebuild the error on any rank."""
        kind: type[HoldfastError] = getattr(errors, self.kind)
        return kind(self.message) if self.errno is None else kind(self.errno, self.message)


def _public_type(error: HoldfastError) -> type[HoldfastError]:
    """Return the type that other ranks know: modules may have narrower ones of their own."""
    public = vars(errors).values()
    return next(kind for kind in type(error).__mro__ if issubclass(kind, HoldfastError) and kind in public)


class VoteOutcome(msgspec.Struct, frozen=True):
    """The result of a rank's work, or its failure."""

    payload: bytes = b""
    failure: RankFailure | None = None


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(VoteOutcome).decode


class VoteRound:
    """The keys of one vote in the store."""

    def __init__(self, store: DeadlineStore, number: int, size: int, phase: str) -> None:
        self._store, self._number, self.phase = store, number, phase
        self._keys = [f"{number}/{rank}" for rank in range(size)]

    def post_outcome(self, rank: int, outcome: VoteOutcome) -> None:
        """Publish a rank's outcome."""
        self._store.set(self._keys[rank], _pack(outcome))
        if outcome.failure is not None:
            self._store.set(failed_key(self._number), outcome.failure.kind.encode())

    def collect_and_decide(self, timeout: float, decide: Decide) -> VoteOutcome:
        """Collect the outcomes of all ranks, decide, and publish the decision, whatever happens meanwhile."""
        decision = VoteOutcome(
            failure=RankFailure(RankFailedError.__name__, f"rank {COORDINATOR_RANK} was interrupted while {self.phase}")
        )
        try:
            decision = self._make_decision(timeout, decide)
        finally:
            self._store.set(self._decision_key(self._number), _pack(decision))
        self._delete_old_keys()
        return decision

    def _make_decision(self, timeout: float, decide: Decide) -> VoteOutcome:
        try:
            self._wait_for_keys(self._keys, timeout, describe_missing=self._describe_missing)
        except RankTimeoutError as error:
            return VoteOutcome(failure=RankFailure.from_error(error))
        self._store.set(self._collected_key)
        outcomes = [_unpack(raw) for raw in self._store.get(*self._keys)]
        if self._store.check([self._given_up_key]):
            message = f"rank {COORDINATOR_RANK} came too late while {self.phase}: others have stopped waiting for it"
            return VoteOutcome(failure=RankFailure(RankTimeoutError.__name__, message))
        return _merge_votes(outcomes, decide, self.phase)

    def await_decision(self, timeout: float, _: Decide) -> VoteOutcome:
        """Wait until all ranks have posted, and then for the decision: a commit may take its time, too."""
        key = self._decision_key(self._number)
        try:
            describe_missing = self._describe_missing if len(self._keys) <= _FEW else self._describe_missing_briefly
            self._wait_for_keys(
                [self._collected_key], timeout + GRACE_SECONDS, alternative_key=key, describe_missing=describe_missing
            )
            self._wait_for_keys([key], timeout + GRACE_SECONDS, describe_missing=self._describe_missing_briefly)
        except RankTimeoutError:
            self._store.set(self._given_up_key)
            raise
        (decision,) = self._store.get(key)
        return _unpack(decision)

    def _delete_old_keys(self) -> None:
        # Every rank that posted to this vote has read the decision of the previous one.
        previous = self._number - 1
        self._store.delete_keys(
            *self._keys, self._decision_key(previous), f"{previous}/collected", failed_key(previous)
        )

    @staticmethod
    def _decision_key(number: int) -> str:
        return f"{number}/decision"

    @property
    def _collected_key(self) -> str:
        return f"{self._number}/collected"

    @property
    def _given_up_key(self) -> str:
        """The key that is set once a rank has timed out: it has raised already, so nothing may be committed."""
        return f"{self._number}/given up"

    def _wait_for_keys(
        self,
        keys: list[str],
        timeout: float,
        alternative_key: str | None = None,
        *,
        describe_missing: Callable[[], str],
    ) -> None:
        """Wait until all keys are set, or the alternative one. Raises ``RankTimeoutError``."""

        def is_complete() -> bool:
            return self._store.check(keys) or bool(alternative_key and self._store.check([alternative_key]))

        if not poll_until(is_complete, timeout, describe_missing):
            raise RankTimeoutError(self._timeout_message())

    def _timeout_message(self) -> str:
        return (
            f"{self._absent_ranks()} did not come within the timeout while {self.phase}; "
            "it is stuck or dead, or does not make the same calls in the same order"
        )

    def _absent_ranks(self) -> str:
        """Describe the ranks that have not posted; rank 0 if all have, as it has yet to decide."""
        all_came = self._store.check([self._collected_key])
        absent = [] if all_came else [rank for rank, key in enumerate(self._keys) if not self._store.check([key])]
        return format_ranks(absent) if absent else f"rank {COORDINATOR_RANK}"

    def _describe_missing(self) -> str:
        return f"{self._absent_ranks()} while {self.phase}"

    def _describe_missing_briefly(self) -> str:
        """Describe the missing ranks without polling the keys of many ranks, which as many ranks would do."""
        is_late = self._store.check([self._keys[COORDINATOR_RANK]]) and not self._store.check([self._collected_key])
        return f"{'other ranks' if is_late else f'rank {COORDINATOR_RANK}'} while {self.phase}"


def failed_key(vote: int) -> str:
    """Return the key that is set once any rank has failed in a vote, to the name of its error's type."""
    return f"{vote}/failed"


def _merge_votes(outcomes: Sequence[VoteOutcome], decide: Decide, phase: str) -> VoteOutcome:
    """Return the common outcome: a failure if any rank failed, otherwise the decision."""
    failed = [(rank, outcome.failure) for rank, outcome in enumerate(outcomes) if outcome.failure is not None]
    if failed:
        return VoteOutcome(failure=_merge_failures(failed, len(outcomes), phase))
    try:
        return VoteOutcome(decide([outcome.payload for outcome in outcomes]))
    except Exception as error:  # noqa: BLE001 - raised again by every rank
        return VoteOutcome(failure=RankFailure.from_error(error))


def _merge_failures(failed: list[tuple[int, RankFailure]], size: int, phase: str) -> RankFailure:
    """Return one failure for all ranks: the first, with the ranks on which it happened.

    That of a rank that gave up because of another's failure counts last.
    """
    causes = [item for item in failed if item[1].kind != PeerFailedError.__name__]
    failed = causes or failed
    first = failed[0][1]
    same_ranks = [rank for rank, failure in failed if failure == first]
    if len(same_ranks) == size:
        return first
    message = f"{format_ranks(same_ranks)} of {size}, {phase}: {first.message}"
    others = [rank for rank, failure in failed if failure != first]
    if others:
        message += f" ({format_ranks(others)} failed too, differently)"
    return RankFailure(first.kind, message, first.errno)


def format_ranks(ranks: Sequence[int]) -> str:
    """Format rank numbers for a message."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(str(rank) for rank in ranks[:_SHOWN])
    return f"ranks {shown}" + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")


def _to_printable(message: object) -> str:
    """Return a message as valid Unicode: file names may contain other bytes."""
    return str(message).encode(errors="backslashreplace").decode()
