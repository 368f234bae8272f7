"""One load, from finding the checkpoint to the last value in place, on all ranks together.

Everything that can be known before a tensor of the caller's is touched is checked before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from holdfast.catalog import find, latest
from holdfast.engine.checks import Checks
from holdfast.engine.local import LocalPart
from holdfast.engine.ranks import LEADER, Call, Ranks, same_call, unanimous
from holdfast.engine.read import read_pieces
from holdfast.engine.runs import Layout, Run, local_runs
from holdfast.engine.transfer import Fragments, Piece, decode_fragments, encode_fragments
from holdfast.errors import DamagedError, DisagreementError, NoCheckpointError
from holdfast.formats.detect import is_checkpoint, open_reader
from holdfast.formats.native import NativeReader
from holdfast.formats.reader import Reader, Values
from holdfast.layout.dtypes import width
from holdfast.layout.files import TensorInfo
from holdfast.layout.names import check_tag
from holdfast.state.capture import Training
from holdfast.state.restore import Intake, Policy
from holdfast.state.tensors import DTYPES, describe


@dataclass(frozen=True)
class LoadRequest:
    """What to load from where. Without a ``tag``: the latest, or ``path`` itself where it is a checkpoint."""

    path: Path
    tag: str | None
    training: Training
    policy: Policy
    verify: bool


@dataclass(frozen=True)
class Restored:
    """What a load did.

    ``missing`` and ``unexpected`` are names only in the objects or only in the checkpoint (with
    ``strict=False``, and ``"rng"`` where a resume found no generator states for this rank). ``exact`` names the
    parts that are bit for bit what was saved, ``rederived`` those that could not be. ``verified`` tells
    whether every byte read was checked against its CRC.
    """

    user_content: Any
    rank_content: Any
    tag: str
    step: float | None
    verified: bool
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    exact: tuple[str, ...]
    rederived: tuple[str, ...] = ()
    fell_back_from: tuple[str, ...] = ()


class _Announcement(Call, frozen=True, kw_only=True):
    path: str
    tag: str | None
    given: list[str]


_encode = msgspec.msgpack.Encoder().encode


def load(request: LoadRequest, ranks: Ranks, timeout: float) -> Restored:
    """Load, on all ranks. Until every check has passed on every rank, nothing of the caller's is changed."""
    return _Load(request, ranks, timeout).run()


class _Load:
    """The steps of one load; each ends in a vote."""

    def __init__(self, request: LoadRequest, ranks: Ranks, timeout: float) -> None:
        self._request, self._global_rank = request, ranks.global_ranks()[ranks.rank]
        self._session = ranks.session(timeout)

    def run(self) -> Restored:
        folder = self._find()
        reader, intake, values = self._match(folder)
        verified = self._read(reader, intake)
        self._session.all("putting values in place", intake.apply)
        return self._report(reader, intake, values, verified=verified)

    def _find(self) -> Path:
        """The checkpoint that rank 0 finds is the one that all ranks load."""
        request = self._request

        def work() -> _Announcement:
            if request.tag is not None:
                check_tag(request.tag)
            return _Announcement(call="load", path=str(request.path), tag=request.tag, given=request.training.given())

        def decide(posted: list[bytes]) -> bytes:
            same_call(posted)
            said = [msgspec.msgpack.decode(raw, type=_Announcement) for raw in posted]
            unanimous("the path", [repr(one.path) for one in said])
            unanimous("the tag", [repr(one.tag) for one in said])
            unanimous("what is loaded", [", ".join(one.given) or "nothing" for one in said])
            return str(_locate(request.path, request.tag)).encode()

        _, found = self._session.vote("finding the checkpoint", work, _encode, decide)
        return Path(found.decode())

    def _match(self, folder: Path) -> tuple[Reader, Intake, Values]:
        """Read the metadata, find a target for everything, allocate what is new."""
        request = self._request

        def work() -> tuple[Reader, Intake, Values]:
            reader = self._open(folder)
            if request.verify:
                reader.check_files()
            intake = Intake(request.training, reader.groups, reader.tied, request.policy)
            values = reader.values(self._session.rank, intake.shared, intake.own)
            if values.world_size != self._session.size:
                values = Values(values.shared, None, values.world_size)
            intake.match(values.shared, values.own, str(folder))
            return reader, intake, values

        def decide(posted: list[bytes]) -> bytes:
            return unanimous(f"the contents of {folder}", [raw.decode() for raw in posted]).encode()

        return self._session.vote("reading the metadata", work, lambda found: found[0].fingerprint.encode(), decide)[0]

    def _open(self, folder: Path) -> Reader:
        try:
            return open_reader(folder)
        except NoCheckpointError:
            if self._session.rank == LEADER:
                raise
            raise DisagreementError(
                f"{folder}, which rank 0 has found, cannot be seen here: all ranks must load from a shared file system"
            ) from None

    def _read(self, reader: Reader, intake: Intake) -> bool:
        """Fill the targets. Returns whether every byte was verified."""
        numbered = sorted((group, name) for group, names in reader.groups.items() for name in names)
        checks = Checks(reader, numbered) if self._request.verify else None

        def work() -> Fragments:
            transfer = _Transfer(reader, numbered, self._global_rank)
            for key, tensor in intake.targets.items():
                transfer.add(key, tensor)
            found = read_pieces(list(transfer.files), transfer.pieces, transfer.parts.__getitem__)
            return checks.check_own(found) if checks else {}

        def decide(posted: list[bytes]) -> bytes:
            if checks:
                checks.check_shared(decode_fragments(posted))
            return b""

        try:
            self._session.vote("reading", work, encode_fragments, decide)
        except DamagedError as error:
            raise DamagedError(f"{error}. {_partly(self._request.training)}") from error
        return checks is not None and checks.cover(intake.targets)

    def _report(self, reader: Reader, intake: Intake, values: Values, *, verified: bool) -> Restored:
        manifest = reader.manifest if isinstance(reader, NativeReader) else None
        exact = [*self._request.training.given(), *(["rng"] if self._request.policy.rng else [])]
        return Restored(
            user_content=values.shared.get("user_content"),
            rank_content=None if values.own is None else values.own.get("content"),
            tag=reader.path.name,
            step=manifest.step if manifest else None,
            verified=verified,
            missing=tuple(intake.findings.missing),
            unexpected=tuple(intake.findings.unexpected),
            exact=tuple(name for name in exact if name not in intake.findings.missing),
        )


def _locate(path: Path, tag: str | None) -> Path:
    if tag is not None:
        return find(path, tag)
    return path if is_checkpoint(path) else latest(path).path


class _Transfer:
    """What this rank reads: pieces of files, and the parts of tensors that they go into."""

    def __init__(self, reader: Reader, numbered: Sequence[tuple[str, str]], rank: int) -> None:
        self._reader, self._rank = reader, rank
        self._number = {key: i for i, key in enumerate(numbered)}
        self.files: dict[Path, int] = {}
        self.pieces: list[Piece] = []
        self.parts: dict[int, LocalPart] = {}

    def add(self, key: tuple[str, str], tensor: torch.Tensor) -> None:
        """Plan to fill a tensor from the stored tensor ``key``."""
        number, info = self._number[key], self._reader.groups[key[0]][key[1]]
        described = describe(tensor, f"{key[0]} tensor {key[1]!r}")
        self.parts[number] = LocalPart(described.local, DTYPES[info.dtype])
        local = 0
        for run in self._runs(info, described.layout):
            for extent in self._reader.extents(*key, run.start, run.stop):
                file = self.files.setdefault(extent.file, len(self.files))
                self.pieces.append(Piece(number, extent.start, extent.stop, local, file, extent.offset))
                local += extent.stop - extent.start

    def _runs(self, info: TensorInfo, layout: Layout | None) -> Sequence[Run]:
        """The byte ranges of the stored tensor that this rank's part consists of."""
        if layout is None:
            return [Run(0, info.nbytes)]
        size = width(info.dtype)
        return [Run(start * size, stop * size) for start, stop in local_runs(info.shape, layout, self._rank)]


def _partly(training: Training) -> str:
    objects: Mapping[str, Any] = {name: getattr(training, name) for name in training.given()}
    filled = [name for name in objects if name != "scheduler"]
    return (
        f"The {' and '.join(filled)} passed may be partly filled: do not use them"
        if filled
        else "Nothing of yours was changed"
    )
