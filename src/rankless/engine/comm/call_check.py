"""A check that all ranks make the same call: ranks compare digests of it, and exchange the text if these differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from rankless.engine.comm.session import Session, require_equal
from rankless.engine.plan.spec import digest_bytes
from rankless.errors import RankMismatchError

#: Bytes of the digest.
_DIGEST_BYTES = 8

_SAME, _DIFFERENT = b"=", b"!"


class CallDescription(msgspec.Struct, frozen=True):
    """A call and its arguments, as text by the name of each argument."""

    call: str
    arguments: dict[str, str]


def vote_same_call(
    session: Session,
    phase: str,
    call: CallDescription,
    work: Callable[[], bytes],
    decide: Callable[[list[bytes]], bytes],
) -> bytes:
    """Vote on the results of all ranks' ``work``; return the decision.

    Raises ``RankMismatchError`` if the ranks' calls differ.
    """
    encoded = msgspec.msgpack.encode(call)

    def compare_and_decide(posted: list[bytes]) -> bytes:
        if len({post[:_DIGEST_BYTES] for post in posted}) > 1:
            return _DIFFERENT
        return _SAME + decide([post[_DIGEST_BYTES:] for post in posted])

    _, decision = session.vote(
        phase, lambda: digest_bytes(encoded, _DIGEST_BYTES) + work(), lambda result: result, compare_and_decide
    )
    if decision == _DIFFERENT:
        session.vote("comparing the arguments of the call", lambda: encoded, lambda result: result, _raise_difference)
    return decision[1:]


def _raise_difference(posted: Sequence[bytes]) -> bytes:
    """Raise ``RankMismatchError`` naming the first difference."""
    descriptions = [msgspec.msgpack.decode(raw, type=CallDescription) for raw in posted]
    require_equal("the call", [description.call for description in descriptions])
    for argument in descriptions[0].arguments:
        require_equal(argument, [description.arguments.get(argument, "nothing") for description in descriptions])
    raise RankMismatchError("ranks were called with different arguments")
