"""A check that all ranks make the same call: ranks compare digests of it, and exchange the text if these differ.

The first vote of most public calls goes this way, on all ranks: the first vote of a save
(:mod:`rankless.save.save_negotiation`), of a load (:mod:`rankless.load.load_operation`), of a live copy and of
``open_weights``. So errors of arguments become common there. For example, all ranks of a save must pass the same tag.
If digests differ, all ranks hold one more vote: each must derive this need from the same decision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from rankless.engine.comm.session import Session, require_equal
from rankless.engine.plan.tensor_specs import digest_bytes
from rankless.errors import RankMismatchError
from rankless.process.prepared_types import prepared

#: Bytes of a digest, and of the three digests of a call.
_DIGEST_BYTES = 8
_DIGESTS_BYTES = 3 * _DIGEST_BYTES

_SAME, _DIFFERENT = b"=", b"!"


@prepared
class CallDescription(msgspec.Struct, frozen=True):
    """A call and its arguments, as text by the name of each argument.

    ``shared`` are arguments that are compared only between ranks which name the same members: members and value.
    """

    call: str
    arguments: dict[str, str]
    shared: dict[str, tuple[str, str]] = {}

    def digest(self) -> bytes:
        """Return digests of the values that all ranks compare, of the members, and of the values that these compare."""
        members = {name: value[0] for name, value in self.shared.items()}
        parts = (self.call, self.arguments), members, self.shared
        return b"".join(digest_bytes(msgspec.msgpack.encode(part), _DIGEST_BYTES) for part in parts)


def vote_same_call(
    session: Session,
    phase: str,
    describe: Callable[[], CallDescription],
    work: Callable[[], bytes],
    decide: Callable[[list[bytes]], bytes],
) -> bytes:
    """Vote on the results of all ranks' ``work``; return the decision.

    ``work`` checks the arguments first. Then ``describe`` returns this rank's call. Both run inside the vote: all ranks
    raise an error of one of them. Raises ``RankMismatchError`` if the ranks' calls differ.

    Call it on all ranks, as the first vote of a session. ``decide`` runs on rank 0, only if all calls are equal.
    """

    def work_and_describe() -> bytes:
        result = work()
        return describe().digest() + result

    def compare_and_decide(posted: list[bytes]) -> bytes:
        if _are_different([post[:_DIGESTS_BYTES] for post in posted]):
            return _DIFFERENT
        return _SAME + decide([post[_DIGESTS_BYTES:] for post in posted])

    _, decision = session.vote(phase, work_and_describe, lambda result: result, compare_and_decide)
    if decision == _DIFFERENT:
        session.vote(
            "comparing the arguments of the call",
            lambda: msgspec.msgpack.encode(describe()),
            lambda result: result,
            _raise_difference,
        )
    return decision[1:]


def _are_different(digests: Sequence[bytes]) -> bool:
    """Return whether calls differ, or values that the same members share."""
    shared = {digest[_DIGEST_BYTES:] for digest in digests}
    members = {digest[:_DIGEST_BYTES] for digest in shared}
    return len({digest[:_DIGEST_BYTES] for digest in digests}) > 1 or len(shared) > len(members)


def _raise_difference(posted: Sequence[bytes]) -> bytes:
    """Raise ``RankMismatchError`` naming the first difference."""
    descriptions = [msgspec.msgpack.decode(raw, type=CallDescription) for raw in posted]
    require_equal("the call", [description.call for description in descriptions])
    for argument in descriptions[0].arguments:
        require_equal(argument, [description.arguments.get(argument, "nothing") for description in descriptions])
    for name in sorted({name for description in descriptions for name in description.shared}):
        _require_equal_among_members(name, [description.shared.get(name, ("", "")) for description in descriptions])
    raise RankMismatchError("ranks were called with different arguments")


def _require_equal_among_members(name: str, posted: Sequence[tuple[str, str]]) -> None:
    """Raise ``RankMismatchError`` if ranks that name the same members have other values."""
    first: dict[str, int] = {}
    for rank, (members, value) in enumerate(posted):
        other = first.setdefault(members, rank)
        if value != posted[other][1]:
            raise RankMismatchError(
                f"ranks disagree about {name}: rank {other} has {posted[other][1]}, rank {rank} has {value}"
            )
