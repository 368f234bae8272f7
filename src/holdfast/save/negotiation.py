"""What ranks agree on before a save: that they are asked for the same, who holds what, and the values of all together.

Each tells 80 bytes, digests for the most part; only what is new or differs is told in full, each distinct thing once.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from holdfast.engine.comm.call_check import CallDescription, vote_same_call
from holdfast.engine.comm.session import Session
from holdfast.engine.comm.spec_exchange import SpecDigests, SpecDirectory, deduplicate, digest_specs
from holdfast.engine.plan.global_spec import GlobalSpec
from holdfast.engine.plan.spec import digest_spec
from holdfast.state.capture import (
    Capture,
    capture_training,
    check_rank_state,
    check_rank_states,
    merge_values,
    merged_bytes,
)
from holdfast.state.training import TrainingObjects
from holdfast.storage.posix import host_name

#: Bytes of the key of a plan, and of the digests of the values and of the host.
_KEY, _VALUES, _HOST = 8, 16, 8

#: An announcement: the key of the plan that a rank knows, the digests of its spec, its meshes, its values and its host,
#: and how many bytes belong to it alone.
_ANNOUNCEMENT = struct.Struct(f"{_KEY}s16s16s{_VALUES}s{_HOST}sQ")

_encode = msgspec.msgpack.Encoder().encode

#: A rank's spec and meshes, as it tells them.
_Held = tuple[bytes, bytes]


class SaveRequestProtocol(Protocol):
    """What a rank is asked to save."""

    @property
    def training(self) -> TrainingObjects:
        """The objects."""

    def asked(self) -> CallDescription:
        """What all ranks must be asked for alike."""

    def check(self) -> None:
        """Raise ``InvalidArgumentError`` for what cannot be done."""

    def check_place(self) -> None:
        """Rank 0: raise where there is something already that must stay, or that is of another kind."""

    def packing(self) -> bytes:
        """All that decides, beside the tensors, what lies in which file."""


class _GlobalDecision(msgspec.Struct, frozen=True):
    """What rank 0 makes of the announcements.

    ``key`` is the plan's; ``census`` is there where the plan is new, and ``tellers`` are the ranks that tell their
    values, where those differ. The ranks are on so many ``hosts``.
    """

    key: bytes
    census: SpecDirectory | None
    tellers: list[int]
    hosts: int


class _RankContribution(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells the others: its spec, meshes and values; nothing where another has told the same."""

    held: _Held
    values: bytes


@dataclass(frozen=True)
class SaveAgreement:
    """What this rank brings, and what all have agreed on.

    ``key`` stands for the plan; ``membership`` is there where no rank has that plan yet, or not all have it. ``merged``
    are, on rank 0, the values of all ranks' models and optimizers. The ranks are on so many ``hosts``.
    """

    captured: Capture
    key: bytes
    membership: GlobalSpec | None
    merged: Mapping[str, Any]
    hosts: int


def negotiate_save(
    request: SaveRequestProtocol, session: Session, global_ranks: Sequence[int], known: bytes
) -> SaveAgreement:
    """Look at what is to be saved, and agree. ``known`` is the key of the plan that this rank has."""
    captured = Capture()

    def look() -> bytes:
        nonlocal captured
        request.check()
        captured = capture_training(request.training, session.rank)
        held = digest_specs(captured.inventory.spec(), captured.inventory.meshes())
        merged = merged_bytes(captured)
        check_rank_state(captured, merged)
        own_host = digest_spec(host_name().encode(), _HOST)
        return _ANNOUNCEMENT.pack(known, *held, digest_spec(merged, _VALUES), own_host, len(captured.own))

    raw = vote_same_call(
        session,
        "looking at what to save",
        request.asked(),
        look,
        lambda posted: _encode(_decide_globally(request, posted)),
    )
    terms = msgspec.msgpack.decode(raw, type=_GlobalDecision)
    told, merged = _exchange_specs(session, captured, terms)
    membership = terms.census.membership(told, global_ranks) if terms.census else None
    return SaveAgreement(captured, terms.key, membership, merged, terms.hosts)


def _decide_globally(request: SaveRequestProtocol, posted: Sequence[bytes]) -> _GlobalDecision:
    """Rank 0's view of what all ranks announced."""
    request.check_place()
    known, specs, meshes, values, hosts, owns = zip(*map(_ANNOUNCEMENT.unpack, posted), strict=True)
    check_rank_states(owns)
    key = digest_spec(b"".join((*specs, *meshes, request.packing())), _KEY)
    census = None if set(known) == {key} else SpecDirectory.take(list(map(SpecDigests, specs, meshes)))
    _, tellers = deduplicate(values)
    return _GlobalDecision(key, census, tellers if len(tellers) > 1 else [], len(set(hosts)))


def _exchange_specs(
    session: Session, captured: Capture, terms: _GlobalDecision
) -> tuple[list[_Held], Mapping[str, Any]]:
    """The specs and meshes of all ranks, and on rank 0 their values, each told once by the lowest rank that has it."""
    census, inventory = terms.census, captured.inventory
    merged: Mapping[str, Any] = captured.merged

    def work() -> _RankContribution:
        held = census.told_by(session.rank, inventory.spec(), inventory.meshes()) if census else (b"", b"")
        return _RankContribution(held, merged_bytes(captured) if session.rank in terms.tellers else b"")

    def decide(posted: list[bytes]) -> bytes:
        nonlocal merged
        said = [msgspec.msgpack.decode(raw, type=_RankContribution) for raw in posted]
        if terms.tellers:
            merged = merge_values([msgspec.json.decode(said[teller].values) for teller in terms.tellers])
        return _encode([one.held for one in said] if census else [])

    if not terms.tellers and (census is None or census.is_uniform):
        own = (inventory.spec().encode(), inventory.meshes().encode()) if census else (b"", b"")
        return [own], merged
    _, raw = session.vote("telling each other what they hold", work, _encode, decide)
    return msgspec.msgpack.decode(raw, type=list[_Held]), merged
