"""The negotiation of a copy: which ranks are sources, which tensors they hold, and their values.

As for a save, each rank posts digests, and each distinct spec and each distinct set of values is sent once.

:class:`~rankless.live_copy.copy_operation.CopyOperation` calls it on every rank, before anything is matched. Values
travel as the files of a checkpoint would have them: the receivers decode these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rankless.engine.comm.call_check import vote_same_call
from rankless.engine.comm.session import Session
from rankless.engine.comm.spec_directory import SpecDigests, SpecDirectory, deduplicate, digest_specs
from rankless.engine.integrity.compare_values_by_digest import select_unequal
from rankless.engine.integrity.replica_comparison import crc_of_shard
from rankless.engine.plan.global_spec import GlobalSpec, GlobalTensor
from rankless.engine.plan.tensor_specs import PER_RANK, digest_bytes
from rankless.errors import InvalidArgumentError, RankMismatchError
from rankless.live_copy.copy_request import CopyRequest
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.value_files import build_ranks_file, build_state_file
from rankless.process.prepared_types import prepared
from rankless.state.capture import (
    Capture,
    capture_training,
    check_rank_state,
    encode_merged_values,
    merge_values,
)
from rankless.state.compared_values import digest_values
from rankless.state.own_mesh_rank import find_mesh_rank
from rankless.state.training import TrainingObjects

_encode = msgspec.msgpack.Encoder().encode

#: A rank's encoded spec and meshes; empty if another rank sends equal ones.
_EncodedSpec = tuple[bytes, bytes]


@prepared
class _Role(msgspec.Struct, frozen=True, array_like=True):
    """The components that a rank gives, and those that it gets; ``None`` if it is no source, or gets nothing.

    ``policy`` describes the arguments that matter to ranks that receive.
    """

    given: list[str] | None
    filled: list[str] | None
    policy: str


@prepared
class _Announcement(msgspec.Struct, frozen=True, array_like=True):
    """Digests of a source rank's state, and its number in the meshes of its tensors."""

    spec: bytes
    meshes: bytes
    values: bytes
    mesh_rank: int


@prepared
class _Directory(msgspec.Struct, frozen=True, array_like=True):
    """The decision on the announcements: who sends specs, who sends values, and the number of each rank in meshes."""

    specs: SpecDirectory
    value_ranks: list[int]
    mesh_ranks: list[int]


@prepared
class _Contribution(msgspec.Struct, frozen=True, array_like=True):
    """The specs and values that a rank sends. Fields that another rank sends, too, are empty.

    ``crcs`` are the CRCs of the tensors among the rank's own values, by name. ``digests`` are the digests of the values
    that receivers get from the first source.
    """

    encoded_spec: _EncodedSpec
    merged: bytes
    shared: dict[str, bytes]
    rank_values: bytes
    crcs: dict[str, int]
    digests: dict[str, bytes]


@prepared
class _SourceContent(msgspec.Struct, frozen=True, array_like=True):
    """The specs of all ranks, the values of the sources as a checkpoint has them in two files, and CRCs.

    ``differing`` are the names of values that differ between the sources.
    """

    encoded_specs: list[_EncodedSpec]
    state_file: bytes
    ranks_file: bytes
    crcs: dict[str, int]
    differing: list[str]


@dataclass(frozen=True)
class SourceState:
    """The state that the ``ranks`` give: their tensors by group and name, their values, and this rank's part of it.

    ``crcs`` are the CRCs of the tensors that belong to single ranks. ``differing`` are the names of values that differ
    between the ranks: only the first rank's are copied.
    """

    ranks: Sequence[int]
    captured: Capture
    spec: GlobalSpec
    tensors: Mapping[tuple[str, str], GlobalTensor]
    state_file: bytes
    ranks_file: bytes
    crcs: Mapping[str, int]
    differing: frozenset[str]

    @property
    def name(self) -> Path:
        """The name of the source in messages. For example, ``the state of ranks 0, 1``."""
        return Path(f"the state of rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}")

    @property
    def groups(self) -> dict[str, dict[str, TensorInfo]]:
        """The tensors, by group and name."""
        groups: dict[str, dict[str, TensorInfo]] = {}
        for (group, name), tensor in self.tensors.items():
            groups.setdefault(group, {})[name] = tensor.info
        return groups

    def find_crcs(self, name: str) -> list[int]:
        """Return the CRC of a tensor that belongs to one rank."""
        return [self.crcs[name]]


def agree_on_sources(request: CopyRequest, session: Session) -> list[int]:
    """Return the source ranks. Raises ``RankMismatchError`` if ranks make different calls.

    All ranks call it first: it is the vote "looking at what to copy".
    """

    def check_call() -> bytes:
        request.check_arguments(session.size)
        given, filled = request.find_given(session.rank), request.find_filled(session.rank)
        return _encode(_Role(_names_of(given), _names_of(filled), request.describe_policy()))

    def decide(posted: list[bytes]) -> bytes:
        roles = [msgspec.msgpack.decode(raw, type=_Role) for raw in posted]
        given = {rank: role.given for rank, role in enumerate(roles) if role.given is not None}
        receiving = {rank: role for rank, role in enumerate(roles) if role.filled is not None}
        _require_equal("what the sources give", given)
        _require_equal("what is copied into", {rank: role.filled or [] for rank, role in receiving.items()})
        _require_equal("the arguments", {rank: [role.policy] for rank, role in receiving.items()})
        if not given:
            raise InvalidArgumentError("no rank is a source: pass sources=, or on some ranks source=")
        return _encode(list(given))

    raw = vote_same_call(session, "looking at what to copy", request.describe_call, check_call, decide)
    return msgspec.msgpack.decode(raw, type=list[int])


def _names_of(objects: TrainingObjects | None) -> list[str] | None:
    return None if objects is None else objects.component_names()


def _require_equal(subject: str, components: Mapping[int, list[str]]) -> None:
    """Raise ``RankMismatchError`` if ranks have different components."""
    first = next(iter(components), 0)
    for rank, names in components.items():
        if names != components[first]:
            raise RankMismatchError(
                f"ranks disagree about {subject}: rank {first} passes {', '.join(components[first]) or 'nothing'}, "
                f"rank {rank} {', '.join(names) or 'nothing'}"
            )


def exchange_source(
    given: TrainingObjects | None, sources: Sequence[int], session: Session, global_ranks: Sequence[int]
) -> SourceState:
    """Capture the state on the source ranks, and tell all ranks its contents. No tensor is moved.

    All ranks call it. It holds the votes "looking at the state of the sources" and "exchanging the specs of the
    sources".
    """
    captured = Capture()
    leader, own_rank = sources[0], global_ranks[session.rank]

    def capture() -> _Announcement:
        nonlocal captured
        if given is not None:
            captured = capture_training(given, session.rank, leader)
        digests = digest_specs(captured.inventory.build_spec(), captured.inventory.build_meshes())
        merged = encode_merged_values(captured)
        check_rank_state(captured, merged)
        mesh_rank = None if given is None else find_mesh_rank(given)
        return _Announcement(*digests, digest_bytes(merged), own_rank if mesh_rank is None else mesh_rank)

    def decide(posted: list[bytes]) -> bytes:
        announced = [msgspec.msgpack.decode(raw, type=_Announcement) for raw in posted]
        specs = SpecDirectory.from_digests([SpecDigests(rank.spec, rank.meshes) for rank in announced])
        _, first = deduplicate([announced[rank].values for rank in sources])
        mesh_ranks = _number_ranks([announced[rank].mesh_rank for rank in range(len(announced))], sources)
        return _encode(_Directory(specs, [sources[index] for index in first], mesh_ranks))

    _, raw = session.vote("looking at the state of the sources", capture, _encode, decide)
    directory = msgspec.msgpack.decode(raw, type=_Directory)
    _, raw = session.vote(
        "exchanging the specs of the sources",
        lambda: _make_contribution(captured, directory, session.rank, is_compared=len(sources) > 1),
        _encode,
        partial(_merge_contributions, sources=sources, value_ranks=directory.value_ranks),
    )
    content = msgspec.msgpack.decode(raw, type=_SourceContent)
    spec = directory.specs.build_global_spec(content.encoded_specs, directory.mesh_ranks, is_partial=True)
    tensors = {(tensor.group, tensor.name): tensor for tensor in spec.iter_tensors()}
    differing = frozenset(content.differing)
    return SourceState(
        sources, captured, spec, tensors, content.state_file, content.ranks_file, content.crcs, differing
    )


def _number_ranks(mesh_ranks: Sequence[int], sources: Sequence[int]) -> list[int]:
    """Return the number of each rank in the meshes of the sources. Other ranks' numbers are only for messages."""
    numbers = {rank: mesh_ranks[rank] for rank in sources}
    if len(set(numbers.values())) < len(numbers):
        raise RankMismatchError(
            "the device meshes of several source ranks have the same number for them: their objects were made in "
            "different process groups"
        )
    taken = {*numbers.values()}
    others = {rank: number for rank, number in enumerate(mesh_ranks) if number not in taken}
    return [numbers.get(rank, others.get(rank, -2 - rank)) for rank in range(len(mesh_ranks))]


def _make_contribution(captured: Capture, directory: _Directory, rank: int, *, is_compared: bool) -> _Contribution:
    spec, meshes = captured.inventory.build_spec(), captured.inventory.build_meshes()
    return _Contribution(
        directory.specs.encode_contribution(rank, spec, meshes),
        encode_merged_values(captured) if rank in directory.value_ranks else b"",
        captured.shared_values,
        captured.rank_values,
        {
            name: crc_of_shard(shard, 0, shard.nbytes)
            for (group, name), shard in captured.tensors.items()
            if group == PER_RANK
        },
        digest_values(captured.compared) if is_compared else {},
    )


def _merge_contributions(posted: list[bytes], sources: Sequence[int], value_ranks: Sequence[int]) -> bytes:
    contributions = [msgspec.msgpack.decode(raw, type=_Contribution) for raw in posted]
    merged: dict[str, Any] = merge_values([msgspec.json.decode(contributions[rank].merged) for rank in value_ranks])
    state_file = build_state_file(merged, contributions[sources[0]].shared)
    ranks_file = build_ranks_file([contributions[rank].rank_values for rank in sources], merged)
    crcs = {name: crc for rank in contributions for name, crc in rank.crcs.items()}
    specs = [rank.encoded_spec for rank in contributions]
    differing = select_unequal(entry for rank in sources for entry in contributions[rank].digests.items())
    return _encode(_SourceContent(specs, state_file, ranks_file, crcs, sorted(differing)))
