"""The negotiation before a save: ranks check that their calls agree, and exchange tensor specs and values.

Each rank posts an announcement of 77 bytes, mostly digests; in its first save, the name of its host follows, and then
16 bytes for each value that ranks only compare. Only new or differing specs and values are sent in full, each distinct
one once. If a rank has the same tensors as in the save before, it also posts the bytes that it prepares for the output:
if that is so on all ranks, rank 0 opens the output in this first vote.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from rankless.engine.comm.call_check import CallDescription, vote_same_call
from rankless.engine.comm.session import Session
from rankless.engine.comm.spec_directory import SpecDigests, SpecDirectory, deduplicate, digest_specs
from rankless.engine.comm.vote import COORDINATOR_RANK
from rankless.engine.integrity.compare_values_by_digest import (
    DIGEST_BYTES,
    encode_digests,
    find_differing,
    has_name,
    join_differing,
    select_differing,
)
from rankless.engine.plan.global_spec import GlobalSpec
from rankless.engine.plan.tensor_specs import digest_bytes
from rankless.errors import RankMismatchError
from rankless.observe.warning import warn_caller
from rankless.process.prepared_types import prepared
from rankless.state.capture import (
    Capture,
    capture_training,
    check_rank_state,
    check_rank_states,
    encode_merged_values,
    merge_values,
)
from rankless.state.compared_values import digest_values
from rankless.state.training import TrainingObjects
from rankless.storage.posix import host_id, host_name

#: The sizes in bytes of a plan's key, and of the digests of the values and of the host name.
_KEY_BYTES, _VALUES_BYTES, _HOST_BYTES = 8, 16, 8

#: An announcement: the key of the plan in the rank's cache, the digests of its spec, its meshes, its values and its
#: host name, the size of its per-rank values, and the sizes of the two fields that follow: the host name, and the bytes
#: that the rank has prepared. After these comes a digest table.
_ANNOUNCEMENT = struct.Struct(f"<{_KEY_BYTES}s16s16s{_VALUES_BYTES}s{_HOST_BYTES}sQBI")

#: The most names in a warning.
_SHOWN = 5

#: The most bytes of the name of a host.
_MAX_NAME = 64

_encode = msgspec.msgpack.Encoder().encode

#: A rank's encoded spec and meshes; empty if another rank sends equal ones.
_EncodedSpec = tuple[bytes, bytes]


class SaveRequestProtocol(Protocol):
    """The request of one rank to save something."""

    @property
    def training(self) -> TrainingObjects:
        """The training objects to save."""

    def describe_call(self) -> CallDescription:
        """Return the arguments that must be equal on all ranks."""

    def check_arguments(self) -> None:
        """Raise ``InvalidArgumentError`` if an argument is invalid."""

    def check_destination(self) -> None:
        """Raise an error if the destination is taken by something that must not be replaced. Called on rank 0.

        The vote "looking at what to save" calls it.
        """

    def packing_key(self) -> bytes:
        """Return an encoding of the arguments that determine how tensors are packed into files."""


@prepared
class _GlobalDecision(msgspec.Struct, frozen=True):
    """The decision of rank 0 on the announcements.

    ``key`` identifies the plan. ``spec_directory`` is ``None`` if all ranks have this plan in their caches.
    ``value_ranks`` are the ranks that must send their values, or empty if all values are equal. ``host_runs`` are the
    hosts of consecutive ranks: the number of a host, and the number of ranks on it. ``differing`` are the names of
    values that only rank 0 stores and that differ between ranks. ``opened`` is the result of :class:`EarlyOpening`. For
    example, ``host_runs`` of ``[(0, 8), (1, 8)]`` means ranks 0 to 7 on host 0, and 8 to 15 on host 1.
    """

    key: bytes
    spec_directory: SpecDirectory | None
    value_ranks: list[int]
    host_runs: list[tuple[int, int]]
    differing: bytes
    opened: bytes = b""


@prepared
class _RankContribution(msgspec.Struct, frozen=True, array_like=True):
    """The spec and values that a rank sends. Each is empty if another rank sends an equal one."""

    encoded_spec: _EncodedSpec
    values: bytes


class EarlyOpening(NamedTuple):
    """The opening of the output in the first vote of a save, if nothing but values has changed since the save before.

    ``own_spec`` identifies the spec of this rank in that save: see :attr:`SaveAgreement.own_spec`. If it is the same,
    ``prepare`` is called with the captured state. If that is so on all ranks, ``open`` is called on rank 0 with the
    results of all.
    """

    own_spec: bytes
    prepare: Callable[[Capture], bytes]
    open: Callable[[list[bytes]], bytes]


class SaveAgreement(msgspec.Struct, frozen=True):
    """The result of the negotiation, and this rank's captured state.

    ``key`` identifies the plan. ``global_spec`` is ``None`` if all ranks have this plan in their caches.
    ``merged_values`` are, on rank 0, the values of all ranks' models and optimizers. ``host_of`` is the number of
    the host of each rank. ``host_names`` are, on rank 0, the names of hosts that were announced in this save.
    ``differing`` are the encoded names of values in :attr:`Capture.compared` that differ between ranks. ``own_spec``
    identifies the spec of this rank; it is empty if values of ranks differ, because then the next save has to exchange
    them. ``opened`` is the result of :class:`EarlyOpening`, empty if the output was not opened.
    """

    captured: Capture
    key: bytes
    global_spec: GlobalSpec | None
    merged_values: Mapping[str, Any]
    host_of: Sequence[int]
    host_names: Mapping[int, str]
    differing: bytes
    own_spec: bytes
    opened: bytes


def negotiate_save(
    request: SaveRequestProtocol,
    session: Session,
    global_ranks: Sequence[int],
    cached_key: bytes,
    *,
    differing: bytes = b"",
    has_metrics: bool = False,
    early: EarlyOpening | None = None,
) -> SaveAgreement:
    """Capture the training state and negotiate the save.

    ``cached_key`` is the key of the plan in this rank's cache. ``differing`` are the encoded names of values
    that were found to differ between ranks and are stored for each rank. ``has_metrics``: this rank was passed some.

    All ranks of a training save, or of one component, call it first. It holds the vote "looking at what to save", and,
    if specs or values are new, the vote "exchanging tensor specs". ``early``: the work of a training save in the first.
    """
    one = _Negotiation(request, session, cached_key, differing, has_metrics, early)
    raw = vote_same_call(session, "looking at what to save", request.describe_call, one.announce, one.decide)
    decision = msgspec.msgpack.decode(raw, type=_GlobalDecision)
    encoded_specs, merged_values = _exchange_specs(session, one.captured, decision)
    directory = decision.spec_directory
    return SaveAgreement(
        one.captured,
        decision.key,
        directory.build_global_spec(encoded_specs, global_ranks) if directory else None,
        merged_values,
        _list_host_of(decision),
        one.host_names,
        decision.differing,
        b"" if decision.value_ranks else one.own_spec,
        decision.opened,
    )


class _Negotiation(msgspec.Struct):
    """The work of one rank in the vote "looking at what to save". The fields are the arguments of the negotiation.

    ``captured`` and ``own_spec`` are set by :meth:`announce`, ``host_names`` by :meth:`decide`.
    """

    request: SaveRequestProtocol
    session: Session
    cached_key: bytes
    differing: bytes
    has_metrics: bool
    early: EarlyOpening | None
    captured: Capture = msgspec.field(default_factory=Capture)
    own_spec: bytes = b""
    host_names: Mapping[int, str] = msgspec.field(default_factory=dict)

    def announce(self) -> bytes:
        """Capture the training state, and return the announcement of this rank."""
        request, session, early = self.request, self.session, self.early
        request.check_arguments()
        self.captured = captured = capture_training(request.training, session.rank, differing=self.differing)
        for message in captured.warnings if session.rank == COORDINATOR_RANK else ():
            warn_caller(message)
        digests = digest_specs(captured.inventory.build_spec(), captured.inventory.build_meshes())
        merged = encode_merged_values(captured)
        check_rank_state(captured, merged)
        host = digest_bytes(host_id().encode(), _HOST_BYTES)
        merged_digest = digest_bytes(merged, _VALUES_BYTES)
        name = b"" if self.cached_key else host_name().encode()[:_MAX_NAME]
        digests_of_values = digest_values(captured.compared) if session.size > 1 else {}
        if self.has_metrics and session.size > 1:
            digests_of_values["metrics"] = bytes(DIGEST_BYTES)
        self.own_spec = b"".join((*digests, request.packing_key()))
        is_known = early is not None and self.cached_key and self.own_spec == early.own_spec
        posted = early.prepare(captured) if early is not None and is_known else b""
        sizes = len(captured.rank_values), len(name), len(posted)
        fixed = _ANNOUNCEMENT.pack(self.cached_key, *digests, merged_digest, host, *sizes)
        return b"".join((fixed, name, posted, encode_digests(digests_of_values)))

    def decide(self, posted: Sequence[bytes]) -> bytes:
        """Decide on the announcements, on rank 0. Open the output if nothing is left to be negotiated."""
        announcements = [_split_announcement(raw) for raw in posted]
        decision = _decide_globally(self.request, announcements)
        early, is_prepared = self.early, announcements[COORDINATOR_RANK].posted
        if early is not None and is_prepared and _may_open(decision, announcements, self.differing):
            opened = early.open([announcement.posted for announcement in announcements])
            decision = msgspec.structs.replace(decision, opened=opened)
        names = [announcement.host_name for announcement in announcements]
        self.host_names = _name_hosts(_list_host_of(decision), names)
        return _encode(decision)


def _may_open(decision: _GlobalDecision, announcements: Sequence[_SaveAnnouncement], differing: bytes) -> bool:
    """Return whether nothing is left to be negotiated: all ranks know the plan, and no values are to be exchanged."""
    is_agreed = decision.spec_directory is None and not decision.value_ranks
    has_new_differing = join_differing(differing, decision.differing) != differing
    return is_agreed and not has_new_differing and all(announcement.posted for announcement in announcements)


def name_differing(session: Session, agreement: SaveAgreement) -> list[str]:
    """Return, on rank 0, the names of the values that differ between ranks.

    All ranks call it if the names were not known: it holds a vote.
    """
    names: set[str] = set()

    def merge_names(posted: Sequence[bytes]) -> bytes:
        names.update(name for raw in posted for name in msgspec.msgpack.decode(raw, type=list[str]))
        return b""

    session.vote(
        "naming what differs between ranks",
        lambda: sorted(select_differing(agreement.captured.compared, agreement.differing)),
        _encode,
        merge_names,
    )
    return sorted(names)


def describe_differing(names: Sequence[str], outcome: str) -> str:
    """Return a warning about values that differ between ranks; ``outcome`` says which ones count."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"ranks hold different values of {', '.join(names[:_SHOWN])}{more}: {outcome}"


class _SaveAnnouncement(NamedTuple):
    """The parts of an announcement. ``fixed`` are the parts in :data:`_ANNOUNCEMENT`."""

    fixed: tuple[Any, ...]
    host_name: bytes
    posted: bytes
    digest_table: bytes


def _split_announcement(raw: bytes) -> _SaveAnnouncement:
    *fixed, name_bytes, posted_bytes = _ANNOUNCEMENT.unpack_from(raw)
    name_end = _ANNOUNCEMENT.size + name_bytes
    table_start = name_end + posted_bytes
    return _SaveAnnouncement(
        tuple(fixed), raw[_ANNOUNCEMENT.size : name_end], raw[name_end:table_start], raw[table_start:]
    )


def _decide_globally(request: SaveRequestProtocol, announcements: Sequence[_SaveAnnouncement]) -> _GlobalDecision:
    """Make the decision of rank 0 on the announcements of all ranks."""
    request.check_destination()
    tables = [announcement.digest_table for announcement in announcements]
    if (rank := _find_left_out(tables, "user_content")) is not None:
        raise RankMismatchError(
            f"rank {rank} passed user_content, and rank {COORDINATOR_RANK}, whose user_content is saved, passed none: "
            f"pass it on rank {COORDINATOR_RANK}, or as per_rank_content"
        )
    if (rank := _find_left_out(tables, "metrics")) is not None:
        warn_caller(
            f"rank {rank} passed metrics, and rank {COORDINATOR_RANK}, whose metrics are saved, passed none: the "
            f"checkpoint has none. Pass them on rank {COORDINATOR_RANK}"
        )
    fixed = (announcement.fixed for announcement in announcements)
    cached_keys, specs, meshes, values, hosts, sizes = zip(*fixed, strict=True)
    check_rank_states(sizes)
    key = digest_bytes(b"".join((*specs, *meshes, request.packing_key())), _KEY_BYTES)
    is_cached = set(cached_keys) == {key}
    directory = None if is_cached else SpecDirectory.from_digests(list(map(SpecDigests, specs, meshes)))
    _, value_ranks = deduplicate(values)
    host_of, _ = deduplicate(hosts)
    host_runs = [(host, len(list(ranks))) for host, ranks in itertools.groupby(host_of)]
    differing = find_differing(announcement.digest_table for announcement in announcements)
    return _GlobalDecision(key, directory, value_ranks if len(value_ranks) > 1 else [], host_runs, differing)


def _find_left_out(tables: Sequence[bytes], name: str) -> int | None:
    """Return the first rank that has a value if rank 0, which stores its own, has none; else ``None``."""
    holding = {table for table in {*tables} if has_name(table, name)}  # tables of very many ranks are mostly equal
    if tables[COORDINATOR_RANK] in holding:
        return None
    return next((rank for rank, table in enumerate(tables) if table in holding), None)


def _list_host_of(decision: _GlobalDecision) -> list[int]:
    """Return the number of the host of each rank."""
    return [host for host, count in decision.host_runs for _ in range(count)]


def _name_hosts(host_of: Sequence[int], names: Sequence[bytes]) -> dict[int, str]:
    """Return the names of hosts by number, as their ranks announced them."""
    return {host: name.decode() for host, name in zip(host_of, names, strict=True) if name}


def _exchange_specs(
    session: Session, captured: Capture, decision: _GlobalDecision
) -> tuple[list[_EncodedSpec], Mapping[str, Any]]:
    """Return the encoded specs of all ranks, and on rank 0 their merged values.

    Of ranks with equal specs or values only the lowest rank sends them.
    """
    directory, inventory = decision.spec_directory, captured.inventory
    merged_values: Mapping[str, Any] = captured.merged_values

    def encode_contribution() -> _RankContribution:
        encoded_spec = b"", b""
        if directory is not None:
            spec, meshes = inventory.build_spec(), inventory.build_meshes()
            encoded_spec = directory.encode_contribution(session.rank, spec, meshes)
        sends_values = session.rank in decision.value_ranks
        return _RankContribution(encoded_spec, encode_merged_values(captured) if sends_values else b"")

    def merge_contributions(posted: list[bytes]) -> bytes:
        nonlocal merged_values
        contributions = [msgspec.msgpack.decode(raw, type=_RankContribution) for raw in posted]
        if decision.value_ranks:
            merged_values = merge_values(
                [msgspec.json.decode(contributions[rank].values) for rank in decision.value_ranks]
            )
        return _encode([contribution.encoded_spec for contribution in contributions] if directory else [])

    if not decision.value_ranks and (directory is None or directory.is_uniform):
        encoded_spec = b"", b""
        if directory is not None:
            encoded_spec = inventory.build_spec().encode(), inventory.build_meshes().encode()
        return [encoded_spec], merged_values
    _, raw = session.vote("exchanging tensor specs", encode_contribution, _encode, merge_contributions)
    return msgspec.msgpack.decode(raw, type=list[_EncodedSpec]), merged_values
