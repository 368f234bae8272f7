"""What a rank was asked to do: ranks compare digests of it, and tell each other the words only where they differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from holdfast.engine.comm.session import Session, require_equal
from holdfast.engine.plan.spec import digest_spec
from holdfast.errors import RankMismatchError

#: Bytes of the digest.
_SIZE = 8

_SAME, _DIFFERENT = b"=", b"!"


class CallDescription(msgspec.Struct, frozen=True):
    """A call and its arguments, as text by what they are."""

    call: str
    about: dict[str, str]


def vote_same_call(
    session: Session,
    phase: str,
    asked: CallDescription,
    work: Callable[[], bytes],
    decide: Callable[[list[bytes]], bytes],
) -> bytes:
    """A vote on what all ranks' ``work`` gave. Raises ``RankMismatchError`` where they were asked different things."""
    words = msgspec.msgpack.encode(asked)

    def compared(posted: list[bytes]) -> bytes:
        if len({one[:_SIZE] for one in posted}) > 1:
            return _DIFFERENT
        return _SAME + decide([one[_SIZE:] for one in posted])

    _, decision = session.vote(phase, lambda: digest_spec(words, _SIZE) + work(), lambda own: own, compared)
    if decision == _DIFFERENT:
        session.vote("telling each other what they were asked", lambda: words, lambda own: own, _compare)
    return decision[1:]


def _compare(posted: Sequence[bytes]) -> bytes:
    said = [msgspec.msgpack.decode(raw, type=CallDescription) for raw in posted]
    require_equal("the call", [one.call for one in said])
    for what in said[0].about:
        require_equal(what, [one.about.get(what, "nothing") for one in said])
    raise RankMismatchError("ranks were asked different things")
