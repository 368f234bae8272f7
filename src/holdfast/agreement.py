"""What ranks agree on before a save: that they are asked for the same, who holds what, and the values of all together.

Each tells 80 bytes, digests for the most part; only what is new or differs is told in full, each distinct thing once.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from holdfast.engine.asked import Asked, first_vote
from holdfast.engine.census import Census, Digests, digests, distinct
from holdfast.engine.membership import Membership
from holdfast.engine.ranks import Session
from holdfast.engine.spec import digest
from holdfast.state.capture import Capture, Training, capture, check_own, check_owns, merge_values, merged_bytes
from holdfast.storage.local import host

#: Bytes of the key of a plan, and of the digests of the values and of the host.
_KEY, _VALUES, _HOST = 8, 16, 8

#: An announcement: the key of the plan that a rank knows, the digests of its spec, its meshes, its values and its host,
#: and how many bytes belong to it alone.
_ANNOUNCEMENT = struct.Struct(f"{_KEY}s16s16s{_VALUES}s{_HOST}sQ")

_encode = msgspec.msgpack.Encoder().encode

#: A rank's spec and meshes, as it tells them.
_Held = tuple[bytes, bytes]


class Wanted(Protocol):
    """What a rank is asked to save."""

    @property
    def training(self) -> Training:
        """The objects."""

    def asked(self) -> Asked:
        """What all ranks must be asked for alike."""

    def check(self) -> None:
        """Raise ``InvalidArgumentError`` for what cannot be done."""

    def check_place(self) -> None:
        """Rank 0: raise where there is something already that must stay, or that is of another kind."""

    def packing(self) -> bytes:
        """All that decides, beside the tensors, what lies in which file."""


class _Terms(msgspec.Struct, frozen=True):
    """What rank 0 makes of the announcements.

    ``key`` is the plan's; ``census`` is there where the plan is new, and ``tellers`` are the ranks that tell their
    values, where those differ. The ranks are on so many ``hosts``.
    """

    key: bytes
    census: Census | None
    tellers: list[int]
    hosts: int


class _Told(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells the others: its spec, meshes and values; nothing where another has told the same."""

    held: _Held
    values: bytes


@dataclass(frozen=True)
class Agreement:
    """What this rank brings, and what all have agreed on.

    ``key`` stands for the plan; ``membership`` is there where no rank has that plan yet, or not all have it. ``merged``
    are, on rank 0, the values of all ranks' models and optimizers. The ranks are on so many ``hosts``.
    """

    captured: Capture
    key: bytes
    membership: Membership | None
    merged: Mapping[str, Any]
    hosts: int


def agree(request: Wanted, session: Session, global_ranks: Sequence[int], known: bytes) -> Agreement:
    """Look at what is to be saved, and agree. ``known`` is the key of the plan that this rank has."""
    captured = Capture()

    def look() -> bytes:
        nonlocal captured
        request.check()
        captured = capture(request.training, session.rank)
        held = digests(captured.inventory.spec(), captured.inventory.meshes())
        merged = merged_bytes(captured)
        check_own(captured, merged)
        own_host = digest(host().encode(), _HOST)
        return _ANNOUNCEMENT.pack(known, *held, digest(merged, _VALUES), own_host, len(captured.own))

    raw = first_vote(
        session, "looking at what to save", request.asked(), look, lambda posted: _encode(_settle(request, posted))
    )
    terms = msgspec.msgpack.decode(raw, type=_Terms)
    told, merged = _tell(session, captured, terms)
    membership = terms.census.membership(told, global_ranks) if terms.census else None
    return Agreement(captured, terms.key, membership, merged, terms.hosts)


def _settle(request: Wanted, posted: Sequence[bytes]) -> _Terms:
    """Rank 0's view of what all ranks announced."""
    request.check_place()
    known, specs, meshes, values, hosts, owns = zip(*map(_ANNOUNCEMENT.unpack, posted), strict=True)
    check_owns(owns)
    key = digest(b"".join((*specs, *meshes, request.packing())), _KEY)
    census = None if set(known) == {key} else Census.take(list(map(Digests, specs, meshes)))
    _, tellers = distinct(values)
    return _Terms(key, census, tellers if len(tellers) > 1 else [], len(set(hosts)))


def _tell(session: Session, captured: Capture, terms: _Terms) -> tuple[list[_Held], Mapping[str, Any]]:
    """The specs and meshes of all ranks, and on rank 0 their values, each told once by the lowest rank that has it."""
    census, inventory = terms.census, captured.inventory
    merged: Mapping[str, Any] = captured.merged

    def work() -> _Told:
        held = census.told_by(session.rank, inventory.spec(), inventory.meshes()) if census else (b"", b"")
        return _Told(held, merged_bytes(captured) if session.rank in terms.tellers else b"")

    def decide(posted: list[bytes]) -> bytes:
        nonlocal merged
        said = [msgspec.msgpack.decode(raw, type=_Told) for raw in posted]
        if terms.tellers:
            merged = merge_values([msgspec.json.decode(said[teller].values) for teller in terms.tellers])
        return _encode([one.held for one in said] if census else [])

    if not terms.tellers and (census is None or census.is_uniform):
        own = (inventory.spec().encode(), inventory.meshes().encode()) if census else (b"", b"")
        return [own], merged
    _, raw = session.vote("telling each other what they hold", work, _encode, decide)
    return msgspec.msgpack.decode(raw, type=list[_Held]), merged
