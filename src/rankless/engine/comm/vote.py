"""One vote over a key-value store: every rank posts an outcome, rank 0 decides, every rank reads the decision.

Ranks poll the store instead of blocking in it: that would stall every other user of the same connection.

:class:`~rankless.engine.comm.session.Session` runs one :class:`VoteRound` for each vote, on every rank. Rank 0
publishes a decision in any case, also if it is interrupted: the others would wait for it until their timeout.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import msgspec

from rankless import errors
from rankless.engine.comm.host_map import HostAgreement, HostRuns
from rankless.engine.comm.polling import poll_until
from rankless.engine.comm.vote_channel import VoteChannel
from rankless.errors import PeerFailedError, RankFailedError, RanklessError, RankMismatchError, RankTimeoutError
from rankless.observe.spans import span

#: The rank that decides for all.
COORDINATOR_RANK = 0

#: Seconds that other ranks wait beyond the deadline for the coordinator's decision.
GRACE_SECONDS = 0.5

#: With more ranks than this, ranks other than the coordinator do not poll which ranks are missing.
_FEW = 64

#: Most ranks that a message lists.
_SHOWN = 8

#: A decision of this many bytes or more is compressed. Its first byte is then one that begins no packed decision.
_MIN_COMPRESSED, _COMPRESSED = 4096, b"\xc1"

#: Makes rank 0's decision over the results of all ranks.
Decide = Callable[[list[bytes]], bytes]


class RankFailure(msgspec.Struct, frozen=True):
    """An error to send to the other ranks: the name of its type in :mod:`rankless.errors`, and its message."""

    kind: str
    message: str
    errno: int | None = None

    @classmethod
    def from_error(cls, error: BaseException) -> RankFailure:
        """Describe an error; an error of another package becomes ``RankFailedError``."""
        if isinstance(error, RanklessError):
            number = error.errno if isinstance(error, OSError) else None
            return cls(_public_type(error).__name__, _to_printable(error.args[-1] if error.args else ""), number)
        return cls(RankFailedError.__name__, describe_error(error))

    def to_error(self) -> RanklessError:
        """Rebuild the error on any rank."""
        kind: type[RanklessError] = getattr(errors, self.kind)
        return kind(self.message) if self.errno is None else kind(self.errno, self.message)


def _public_type(error: RanklessError) -> type[RanklessError]:
    """Return the type that other ranks know: modules may have narrower ones of their own."""
    public = vars(errors).values()
    return next(kind for kind in type(error).__mro__ if issubclass(kind, RanklessError) and kind in public)


class VoteOutcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of a rank's work, or its failure. The decision is one, too.

    ``host`` is the id of the rank's host if the rank does not know the hosts of all ranks. Then the decision has them.
    ``phase`` says what the rank does, for example ``"looking at what to save"``. It is sent in the first vote of a
    call: ranks that were called in different ways differ there.
    """

    payload: bytes = b""
    failure: RankFailure | None = None
    host: bytes = b""
    hosts: HostRuns | None = None
    phase: str = ""


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(VoteOutcome).decode


def encode_decision(decision: VoteOutcome) -> bytes:
    """Encode a decision. A large one is compressed: all ranks read it, or one of each host.

    For example, the decision of the first vote has a number for each rank.
    """
    packed = _pack(decision)
    return packed if len(packed) < _MIN_COMPRESSED else _COMPRESSED + zlib.compress(packed, 1)


def decode_decision(raw: bytes) -> VoteOutcome:
    """Decode a decision."""
    return _unpack(zlib.decompress(raw[1:]) if raw[:1] == _COMPRESSED else raw)


class VoteRound:
    """One vote: every rank posts, rank 0 decides, every rank gets the decision."""

    def __init__(self, channel: VoteChannel, phase: str, agreement: HostAgreement) -> None:
        self._channel, self.phase, self._agreement = channel, phase, agreement

    def post_outcome(self, rank: int, outcome: VoteOutcome) -> None:
        """Publish a rank's outcome."""
        self._channel.post_outcome(rank, _pack(outcome))
        if outcome.failure is not None:
            self._channel.post_failure(outcome.failure.kind)

    def collect_and_decide(self, timeout: float, decide: Decide) -> VoteOutcome:
        """Collect the outcomes of all ranks, decide, and publish the decision, whatever happens meanwhile.

        Rank 0 calls it. Once another rank has given up, the decision is an error: that rank has raised already.
        """
        decision = VoteOutcome(
            failure=RankFailure(RankFailedError.__name__, f"rank {COORDINATOR_RANK} was interrupted while {self.phase}")
        )
        try:
            decision = self._make_decision(timeout, decide)
        except RanklessError as error:  # a rank was found dead, or this one's interruption names its cause
            decision = VoteOutcome(failure=RankFailure.from_error(error))
            raise
        finally:
            self._channel.publish_decision(encode_decision(decision))
        self._channel.delete_outcomes()
        self._channel.close()
        return decision

    def _make_decision(self, timeout: float, decide: Decide) -> VoteOutcome:
        try:
            self._wait_until(self._channel.is_complete, timeout, self._describe_missing)
        except RankTimeoutError as error:
            return VoteOutcome(failure=RankFailure.from_error(error))
        self._channel.mark_collected()
        outcomes = unpack_outcomes(self._channel.read_outcomes())
        if self._channel.is_given_up():
            message = f"rank {COORDINATOR_RANK} came too late while {self.phase}: others have stopped waiting for it"
            return VoteOutcome(failure=RankFailure(RankTimeoutError.__name__, message))
        hosts = self._agreement.answer(outcome.host for outcome in outcomes)
        return msgspec.structs.replace(_merge_votes(outcomes, decide, self.phase), hosts=hosts)

    def await_decision(self, timeout: float, _: Decide) -> VoteOutcome:
        """Wait until all ranks have posted, and then for the decision: a commit may take its time, too.

        All ranks but rank 0 call it.
        """
        is_small = self._channel.size <= _FEW
        describe_missing = self._describe_missing if is_small else self._describe_missing_briefly
        try:
            self._wait_until(self._channel.is_collected, timeout + GRACE_SECONDS, describe_missing)
            self._wait_until(self._channel.is_decided, timeout + GRACE_SECONDS, self._describe_missing_briefly)
        except RankTimeoutError:
            self._channel.give_up()
            self._channel.close()
            raise
        decision = decode_decision(self._channel.read_decision())
        self._channel.close()
        self._agreement.learn(decision.hosts)
        return decision

    def _wait_until(self, is_ready: Callable[[], bool], timeout: float, describe_missing: Callable[[], str]) -> None:
        """Wait for other ranks. Raises ``RankTimeoutError``."""
        with span("wait for other ranks", "wait", self.phase):
            self._channel.begin_wait(timeout)
            is_over = not poll_until(is_ready, timeout, describe_missing)
        if is_over:
            raise RankTimeoutError(
                f"{self._absent_ranks()} did not come within the timeout while {self.phase}; "
                "it is stuck or dead, or does not make the same calls in the same order"
            )

    def _absent_ranks(self) -> str:
        """Describe the ranks that have not posted; rank 0 if all have, as it has yet to decide."""
        absent = self._channel.find_absent()
        return format_ranks(absent) if absent else f"rank {COORDINATOR_RANK}"

    def _describe_missing(self) -> str:
        return f"{self._absent_ranks()} while {self.phase}"

    def _describe_missing_briefly(self) -> str:
        """Describe the missing ranks without polling the keys of many ranks, which as many ranks would do."""
        return f"{'other ranks' if self._channel.does_rank_0_wait() else f'rank {COORDINATOR_RANK}'} while {self.phase}"


def unpack_outcomes(encoded: Sequence[bytes]) -> list[VoteOutcome]:
    """Decode outcomes, equal ones once."""
    decoded = {raw: _unpack(raw) for raw in set(encoded)}
    return [decoded[raw] for raw in encoded]


def _merge_votes(outcomes: Sequence[VoteOutcome], decide: Decide, phase: str) -> VoteOutcome:
    """Return the common outcome: a failure if any rank failed, otherwise the decision."""
    failed = [(rank, outcome.failure) for rank, outcome in enumerate(outcomes) if outcome.failure is not None]
    if failed:
        return VoteOutcome(failure=_merge_failures(failed, len(outcomes), phase))
    other = next((rank for rank, outcome in enumerate(outcomes) if outcome.phase != outcomes[0].phase), None)
    if other is not None:
        message = (
            f"ranks disagree about the call: rank 0 is {outcomes[0].phase}, rank {other} is {outcomes[other].phase}; "
            "make the same call with the same arguments, such as local=, on all ranks"
        )
        return VoteOutcome(failure=RankFailure(RankMismatchError.__name__, message))
    try:
        with span("decide", "step", phase):
            return VoteOutcome(decide([outcome.payload for outcome in outcomes]))
    except Exception as error:  # noqa: BLE001 - raised again by every rank
        return VoteOutcome(failure=RankFailure.from_error(error))


def _merge_failures(failed: list[tuple[int, RankFailure]], size: int, phase: str) -> RankFailure:
    """Return one failure for all ranks: the first, with the ranks where it happened.

    The failure of a rank that gave up because of another's failure counts last.
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
    """Format rank numbers for a message, for example ``rank 3`` or ``ranks 0, 1, 2``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(str(rank) for rank in ranks[:_SHOWN])
    return f"ranks {shown}" + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")


def describe_error(error: BaseException) -> str:
    """Return the type of an error and its message, which code outside this package may fail to make."""
    try:
        message = _to_printable(error)
    except Exception as failure:  # noqa: BLE001 - any code
        message = f"(no message: its __str__ raised {type(failure).__name__})"
    return f"{type(error).__name__}: {message}"


def _to_printable(message: object) -> str:
    """Return a message as valid Unicode: file names may contain other bytes."""
    return str(message).encode(errors="backslashreplace").decode()
