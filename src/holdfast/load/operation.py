"""One load, from finding the checkpoint to the last value in place, on all ranks together.

Everything that can be known before a tensor of the caller's is touched is checked before.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec

from holdfast.engine.comm.call_check import vote_same_call
from holdfast.engine.comm.session import RankGroup, require_equal
from holdfast.engine.comm.spec_exchange import SpecDigests, SpecDirectory, digest_specs
from holdfast.engine.comm.vote import COORDINATOR_RANK
from holdfast.engine.integrity.fragments import decode_fragments, encode_fragments
from holdfast.engine.integrity.verify import ChecksumVerifier
from holdfast.engine.io.requests import Fragments
from holdfast.engine.plan.global_spec import GlobalSpec
from holdfast.engine.plan.spec import PER_RANK
from holdfast.errors import (
    CheckpointReplacedError,
    CorruptCheckpointError,
    MismatchError,
    NoCheckpointError,
    RankMismatchError,
    StorageError,
)
from holdfast.formats.detect import open_reader
from holdfast.formats.native import NativeReader
from holdfast.formats.reader import CheckpointValues, Reader, check_read
from holdfast.formats.remapped_reader import mapping_of, underlying_reader
from holdfast.load.fused_experts import join_experts, with_fused_experts
from holdfast.load.read_plan import ReadPlan
from holdfast.load.request import LoadRequest
from holdfast.load.result import RestoreResult
from holdfast.load.selection import CheckpointSelector, SelectedCheckpoint
from holdfast.observe.reporter import EventReporter
from holdfast.observe.warning import warn_caller
from holdfast.ondisk.manifest import Manifest
from holdfast.state.arrays import ArrayDecoder
from holdfast.state.per_rank import RankState, SavedRankStates, restore_resized, restore_same_world_size
from holdfast.state.restore import LoadTargets, format_names
from holdfast.state.training import TrainingObjects
from holdfast.storage.posix import host_name


class _MatchedContent(msgspec.Struct, frozen=True, array_like=True):
    """What a rank sees of the checkpoint, on which host, and digests of what it wants."""

    fingerprint: str
    host: str
    spec: bytes
    meshes: bytes


class _LoadDecision(msgspec.Struct, frozen=True, array_like=True):
    """What rank 0 makes of it: who wants what, and on how many hosts."""

    census: SpecDirectory
    hosts: int


#: The values that a load gives back without being asked.
CONTENT = "user_content"

_encode = msgspec.msgpack.Encoder().encode

#: A rank's spec and meshes, as it tells them.
_Held = tuple[bytes, bytes]


class LoadOperation:
    """The steps of one load; each ends in a vote.

    Until every check has passed on every rank, nothing of the caller's is changed.
    """

    def __init__(self, request: LoadRequest, ranks: RankGroup, timeout: float, search: CheckpointSelector) -> None:
        self._request, self._ranks, self._session = request, ranks, ranks.session(timeout)
        self._search = search
        self._telling = EventReporter(
            request.path, request.on_event, is_leader=ranks.rank == COORDINATOR_RANK, began=request.began
        )
        self.found = SelectedCheckpoint()
        self._manifest: Manifest | None = None
        #: The caller's tensors that may have been filled; and whether values are being put in place, the last step.
        self.filled: set[tuple[str, str]] = set()
        self.is_applying = False
        #: On rank 0, what any rank was allowed to go without.
        self._lacking: list[str] = []

    def run(self) -> RestoreResult:
        """Load, on all ranks."""
        self.found = self._find()
        folder = Path(self.found.folder)
        reader, intake, terms = self._match(folder)
        membership = self._tell(intake, terms)
        reading = self._plan(reader, intake, membership, terms)
        verified = self._read(reader, intake, reading)
        self.is_applying = True
        self._session.all("putting values in place", intake.apply)
        restored = self._report(intake, verified=verified)
        self._telling.not_read(folder, [note[:3] for note in reader.unread if note.group == CONTENT])
        self._telling.loaded(folder, restored.step, reading.nbytes, verified=verified)
        if self._lacking:
            warn_caller(f"loaded {folder}, but not all that was asked for:\n{format_names(self._lacking)}")
        return restored

    def _find(self) -> SelectedCheckpoint:
        """The checkpoint that rank 0 finds is the one that all ranks load."""
        request = self._request

        def work() -> bytes:
            request.check()
            return b""

        found = vote_same_call(
            self._session,
            "finding the checkpoint",
            request.asked(),
            work,
            lambda _: _encode(self._search.next()),
        )
        return msgspec.msgpack.decode(found, type=SelectedCheckpoint)

    def _match(self, folder: Path) -> tuple[Reader, LoadTargets, _LoadDecision]:
        """Read the metadata, find a target for everything, allocate what is new."""
        request, rank = self._request, self._session.rank
        asked = set(request.training.given())

        def work() -> tuple[Reader, LoadTargets]:
            reader = self._open(folder)
            if request.verify:
                reader.check_files()
            check_read(reader, lambda one: one.group in asked)
            intake = LoadTargets(request.training, reader.groups, reader.tied, request.policy, join_experts(reader))
            arrays = ArrayDecoder(reader.groups.get(PER_RANK, {}))
            values = reader.values(rank, intake.shared, arrays)
            intake.match(values.shared, *self._own(reader, values, arrays))
            intake.take_stock(rank)
            return reader, intake

        def seen(found: tuple[Reader, LoadTargets]) -> bytes:
            reader, intake = found
            held = digest_specs(intake.inventory.spec(), intake.inventory.meshes())
            return _encode(_MatchedContent(reader.fingerprint, host_name(), held.spec, held.meshes))

        def decide(posted: list[bytes]) -> bytes:
            said = [msgspec.msgpack.decode(raw, type=_MatchedContent) for raw in posted]
            require_equal(f"the contents of {folder}", [one.fingerprint for one in said])
            census = SpecDirectory.take([SpecDigests(one.spec, one.meshes) for one in said])
            return _encode(_LoadDecision(census, len({one.host for one in said})))

        found, raw = self._session.vote("reading the metadata", work, seen, decide)
        return *found, msgspec.msgpack.decode(raw, type=_LoadDecision)

    def _own(self, reader: Reader, values: CheckpointValues, arrays: ArrayDecoder) -> tuple[RankState, ArrayDecoder]:
        """What this rank gets back of what belongs to single ranks, and the tensors in it."""
        rank, training, generators = self._session.rank, self._request.training, self._request.policy.rng
        if values.own is None or values.world_size != self._session.size:
            arrays = ArrayDecoder(arrays.infos)
        saved = SavedRankStates(values.ranks, arrays, partial(reader.crcs, PER_RANK), str(reader.path))
        if values.own is not None and values.world_size == self._session.size:
            return restore_same_world_size(values.own, saved, rank, training.dataloader, generators=generators), arrays
        return restore_resized(saved, rank, self._session.size, training.dataloader, generators=generators), arrays

    def _tell(self, intake: LoadTargets, terms: _LoadDecision) -> GlobalSpec:
        """What all ranks want, each distinct wish told once."""
        census, inventory = terms.census, intake.inventory
        told = [(inventory.spec().encode(), inventory.meshes().encode())]
        if not census.is_uniform:
            _, raw = self._session.vote(
                "telling each other what they want",
                lambda: census.told_by(self._session.rank, inventory.spec(), inventory.meshes()),
                _encode,
                lambda posted: _encode([msgspec.msgpack.decode(one, type=_Held) for one in posted]),
            )
            told = msgspec.msgpack.decode(raw, type=list[_Held])
        return census.membership(told, self._ranks.global_ranks())

    def _plan(self, reader: Reader, intake: LoadTargets, membership: GlobalSpec, terms: _LoadDecision) -> ReadPlan:
        """The last check before anything of the caller's is touched, and who reads what."""
        request = self._request
        exchange = request.share_reads == "always" or (request.share_reads == "auto" and terms.hosts > 1)

        def work() -> ReadPlan:
            wanted = list(membership.tensors())
            names = {name for spec in membership.specs for name in spec.names}
            known = {name: membership.names(name) for name in names}
            intake.check({(held.group, held.name) for held in wanted}, known, str(reader.path))
            self._check_refilled(intake, reader.path)
            return ReadPlan.of(reader, intake, wanted, self._ranks, exchange=exchange and self._session.size > 1)

        def decide(posted: list[bytes]) -> bytes:
            told = [name for raw in posted for name in msgspec.msgpack.decode(raw, type=list[str])]
            self._lacking = list(dict.fromkeys(told))
            return b""

        phase = "matching the checkpoint with what it is loaded into"
        return self._session.vote(phase, work, lambda _: _encode(intake.findings.tolerated(request.policy)), decide)[0]

    def _check_refilled(self, intake: LoadTargets, folder: Path) -> None:
        """Raise ``MismatchError`` where another checkpoint has filled what this one would leave as it is."""
        left = sorted(self._search.filled - intake.filled)
        if left:
            raise MismatchError(f"{folder} has no {'/'.join(left[0])}, which would keep values of another checkpoint")

    def _open(self, folder: Path) -> Reader:
        try:
            opened = NativeReader(folder) if self.found.id else open_reader(folder, self._request.keys)
            reader = self._request.seen(opened)
            self._manifest = reader.manifest if isinstance(reader, NativeReader) else None
            return with_fused_experts(reader, self._request.training)
        except NoCheckpointError:
            if self._session.rank == COORDINATOR_RANK:
                raise
            raise RankMismatchError(
                f"{folder}, which rank 0 has found, cannot be seen here: all ranks must load from a shared file system"
            ) from None

    def _read(self, reader: Reader, intake: LoadTargets, reading: ReadPlan) -> bool:
        """Fill the targets. Returns whether every byte was verified."""
        checks = ChecksumVerifier(underlying_reader(reader), reading.numbered) if self._request.verify else None
        moved = self._telling.moving("load", reading.nbytes).add

        def work() -> Fragments:
            intake.materialise()
            found = reading.run(reader, intake, self._ranks, self._session, moved)
            return checks.check_own(found) if checks else {}

        def decide(posted: list[bytes]) -> bytes:
            if checks:
                checks.check_shared(decode_fragments(posted))
            elif not reader.is_current():  # nothing else tells that files of two checkpoints were read
                raise CheckpointReplacedError(f"{reader.path} was replaced or removed while it was read")
            return b""

        self.filled = intake.filled
        try:
            self._session.vote("reading", work, encode_fragments, decide)
        except (CorruptCheckpointError, StorageError, CheckpointReplacedError) as error:
            *also, said = error.args
            raise type(error)(*also, f"{said}. {_is_partly_filled(self._request.training)}") from error
        read = ((group, one) for group, name in intake.targets for one in mapping_of(reader, group, name).names)
        return checks is not None and checks.cover(read)

    def _report(self, intake: LoadTargets, *, verified: bool) -> RestoreResult:
        manifest = self._manifest
        exact, reconstructed = intake.outcome()
        return RestoreResult(
            user_content=intake.user_content,
            per_rank_content=intake.per_rank_content,
            tag=self.found.tag,
            step=manifest.step if manifest else None,
            verified=verified,
            missing=tuple(intake.findings.missing),
            unexpected=tuple(intake.findings.unexpected),
            exact=tuple(exact),
            reconstructed=tuple(reconstructed),
            skipped_checkpoints=tuple(one.tag for one in self.found.corrupt),
            run=manifest.run if manifest else "",
            named_by=dict(intake.named_by),
        )


def _is_partly_filled(training: TrainingObjects) -> str:
    filled = [slot for slot in training.given() if slot.partition("/")[0] in {"model", "optimizer"}]
    return (
        f"The {' and '.join(filled)} passed may be partly filled: do not use them"
        if filled
        else "Nothing of yours was changed"
    )
