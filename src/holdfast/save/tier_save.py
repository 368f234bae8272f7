"""A save into the local tier: the memory of the hosts first, the run directory later.

The tensors are staged into a file of the tier, which is mapped. When all ranks have written the tables of their parts,
the checkpoint is complete in the tier. Then the next save may begin. What follows, if the save is to be *drained*, is
an ordinary write of the staged bytes into the run directory. It is tried again if it fails.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from holdfast.engine.comm.session import RankGroup
from holdfast.engine.comm.vote import COORDINATOR_RANK
from holdfast.engine.integrity import replicas
from holdfast.engine.io.staging_memory import Arena, StagingMemory
from holdfast.errors import HoldfastError, SpaceShortageError, StateError, StorageError
from holdfast.observe.units import format_size
from holdfast.observe.warning import warn_caller
from holdfast.ondisk.manifest import Manifest
from holdfast.run.catalog import CheckpointIdentity
from holdfast.run.retention import is_kept_by_merit
from holdfast.run.scan import CheckpointInfo
from holdfast.run.staging_dir import StagingDirectory
from holdfast.save.base_checkpoint import Base
from holdfast.save.checkpoint_save import CheckpointSave
from holdfast.save.drain_attempts import retry_drain
from holdfast.save.incremental import Candidates
from holdfast.save.negotiation import SaveAgreement
from holdfast.save.request import SaveRequest
from holdfast.save.training_save import SavePlanCache
from holdfast.storage.memory import Bytes
from holdfast.tier.copies import PartCopies, choose_partners
from holdfast.tier.generation import Common, GenerationLabel
from holdfast.tier.options import LocalTier
from holdfast.tier.parity import PartParity, form_groups
from holdfast.tier.part import GenerationKey, PartName, PartTable, hash_ranges
from holdfast.tier.slots import Slot
from holdfast.tier.state import TierState


class _PreparedTierSave(msgspec.Struct, frozen=True, array_like=True):
    """The result of a rank's preparation: the digests of its replicas, and the bytes of memory that it lacks, if any.

    ``host`` identifies the folder of its tier, ``domain`` what may fail as a whole with it.
    """

    digests: bytes
    host: str
    domain: str
    needed: int = 0
    free: int = 0


class _BegunTierSave(msgspec.Struct, frozen=True, array_like=True):
    """The decision of rank 0. There is no identity if replicas differ, or if a rank lacks memory.

    ``hosts`` and ``domains`` are those of all ranks.
    """

    identity: CheckpointIdentity | None = None
    epoch: int = 0
    started_at: float = 0.0
    drains: bool = False
    hosts: list[str] = []
    domains: list[str] = []
    shortage: str = ""
    job: str = ""


_encode = msgspec.msgpack.Encoder().encode


class _SlotArena(Arena):
    """Staging memory in a slot of the tier, which stays in use after the save."""

    def __init__(self, memory: Bytes) -> None:
        super().__init__(StagingMemory())
        self._slot_memory = memory

    def reserve_bytes(self, nbytes: int) -> Bytes:
        """Return ``nbytes`` bytes of the slot."""
        return self._slot_memory[:nbytes]


class TierSave(CheckpointSave):
    """A save into the local tier. If a host lacks memory for it, it is an ordinary save."""

    def __init__(  # noqa: PLR0917 - as an ordinary save, and the tier
        self,
        request: SaveRequest,
        ranks: RankGroup,
        cache: SavePlanCache,
        base: Base,
        timeout: float,
        tier: TierState,
        options: LocalTier,
    ) -> None:
        described = replace(request, known_tags=tier.known_tags, local=options.describe())
        super().__init__(described, ranks, cache, base, timeout)
        self._tier, self._options, self._begun = tier, options, _BegunTierSave()
        self._slot: Slot | None = None
        self._table: PartTable | None = None
        self.completed_locally = Future()
        #: Whether the checkpoint is complete in the tier, and whether a drain was announced that has not ended.
        self._is_complete = self._is_draining = False
        self._info = CheckpointInfo("", self.path)

    def _plan_and_open(self, agreement: SaveAgreement) -> Candidates:
        """Plan, check that replicas are equal, and reserve memory. Open nothing in the run directory."""
        cache, session = self._cache, self._session

        def plan_and_reserve() -> _PreparedTierSave:
            self._update_plan(agreement)
            prepared = _PreparedTierSave(
                self._hash_replicas(), self._tier.folder.identity, self._options.failure_domain
            )
            try:
                self._slot = self._tier.take_slot(self._plan.nbytes)
            except SpaceShortageError as error:
                return msgspec.structs.replace(prepared, needed=error.needed, free=error.free)
            return prepared

        def decide(posted: list[bytes]) -> bytes:
            prepared = [msgspec.msgpack.decode(raw, type=_PreparedTierSave) for raw in posted]
            if not replicas.have_equal_replicas([rank.digests for rank in prepared]):
                return _encode(_BegunTierSave())
            if shortage := _describe_shortage(prepared):
                return _encode(_BegunTierSave(shortage=shortage))
            planned = self._tier.plan_save(self._request.tag, self._request.runs, self._options, self._must_drain)
            hosts, domains = [rank.host for rank in prepared], [rank.domain for rank in prepared]
            started_at = round(time.time(), 6)
            return _encode(
                _BegunTierSave(
                    planned.identity, planned.epoch, started_at, planned.drains, hosts, domains, job=self._tier.job
                )
            )

        _, raw = session.vote("preparing the save", plan_and_reserve, _encode, decide)
        begun = self._begun = msgspec.msgpack.decode(raw, type=_BegunTierSave)
        if begun.shortage:
            return self._save_without_tier(agreement)
        if begun.identity is None:
            cache.key = b""
            raise self._writer.describe_replica_mismatch()
        cache.saves += 1
        self._set_identity(begun.identity)
        self._started_at = begun.started_at
        if begun.drains:
            self._tier.begin_drain()
            self._is_draining = True
            self.follow_up = self._drain
        return Candidates()

    def _must_drain(self, info: CheckpointInfo) -> bool:
        """Return whether the new checkpoint must be drained: the last one of a job, or one that a policy keeps."""
        request = self._request
        step, metrics = request.manifest_numbers()
        described = replace(info, step=step, metrics=metrics)
        return request.forced or (
            request.keep is not None and is_kept_by_merit(request.keep, self._tier.durable, described)
        )

    def _save_without_tier(self, agreement: SaveAgreement) -> Candidates:
        if self._session.rank == COORDINATOR_RANK:
            warn_caller(f"{self.path} is saved without the local tier: {self._begun.shortage}")
        self._release_slot()
        self.completed_locally = None
        return super()._plan_and_open(agreement)

    def _choose_identity(self) -> CheckpointIdentity:
        return self._tier.choose_identity(self._request.runs)

    def _commit_without_tier(self) -> CheckpointInfo:
        info = super().write_and_commit()
        self._tier.forget_newest()
        self._tier.note_durable(info)
        return info

    def stage_tensors(self, arena: Arena) -> None:
        """See :class:`SaveOperation`. The tensors are copied into the slot."""
        super().stage_tensors(arena if self._slot is None else _SlotArena(self._slot.memory))

    def write_and_commit(self) -> CheckpointInfo:
        """Complete the checkpoint in the tier, and copy it to other hosts."""
        if self._slot is None:
            return self._commit_without_tier()
        if self._staged is None:  # a synchronous save
            self.stage_tensors(Arena(StagingMemory()))
            self.complete_staging()
        common = self._complete_locally(self._slot)
        self._release_tensors()
        info = CheckpointInfo.of(self.path, common.label.manifest)
        info = self._info = replace(info, nbytes=sum(file.size for file in self._plan.files))
        if self.completed_locally is not None:
            self.completed_locally.set_result(None)
        self._reporter.report_saved_locally(info.path, info.step, info.nbytes)
        if self._keep_newest(self._slot):
            self._tier.remove_generations(lambda key: key >= common.label.key)
        if not self._begun.drains:
            self._release_slot()
        return info

    @property
    def _key(self) -> GenerationKey:
        return GenerationKey(self._begun.epoch, self._identity.sequence, self._identity.id)

    def _complete_locally(self, slot: Slot) -> Common:
        """Write the tables of all parts. The checkpoint is complete when all ranks have, and the rest is written."""
        session, folder, staged = self._session, self._tier.folder, self._staged
        name = PartName(self._key, session.rank, session.size)

        def write_part() -> bytes:
            if staged is None:
                raise StateError("nothing is staged: this is a bug of holdfast")
            rows = hash_ranges(staged.file_ranges, slot.memory)
            if not self._tier.is_replaced():
                self._tier.take_over(self._begun.job)
            self._table = PartTable(name, slot.path.name, self._plan.nbytes, rows)
            folder.write_part(self._table)
            slot.table = name.name
            return self._captured.rank_values

        def describe(posted: list[bytes]) -> bytes:
            label = GenerationLabel(self._begun.epoch, self._build_manifest({}), self._request.overwrite)
            return _encode(Common(label, {}, self._build_small_files(posted)))

        _, raw = session.vote("completing the local checkpoint", write_part, bytes, describe)
        described = msgspec.msgpack.decode(raw, type=Common)
        groups = {group: list(files) for group, files in self._plan.groups.items()}
        common = msgspec.structs.replace(described, groups=groups)
        session.run_on_all("completing the local checkpoint", partial(folder.write_common, common))
        self._is_complete = True
        self._tier.note_complete(self._key)
        return common

    def _keep_newest(self, slot: Slot) -> bool:
        """Copy the part to other hosts. Return whether the generations before are not needed any more.

        A failure only warns: the checkpoint is complete without copies. If another rank has failed, its host may be
        lost, and only a generation before, which has copies, can be loaded. If memory is short, that must not stay.
        """
        slots = self._tier.slots
        try:
            copies = self._make_redundant(slot)
        except HoldfastError as error:
            if self._session.rank == COORDINATOR_RANK:
                warn_caller(f"{self.path} has no copies on other hosts in the local tier: {error}")
            if not isinstance(error, StorageError):
                slots.keep_alone([slot])
                return False
            copies = []
        slots.keep([slot, *copies])
        for copy in copies:
            slots.unpin(copy)
        return True

    def _make_redundant(self, slot: Slot) -> list[Slot]:
        """Copy the part to other hosts, or compute parity. Return the pinned slots with what this rank got."""
        hosts, rate = self._begun.hosts, self._options.copy_rate
        if self._table is None:
            return []
        if self._options.parity:
            groups = form_groups(hosts, self._options.parity)
            return PartParity(self._ranks, self._session, self._tier, groups, rate).make(slot, self._table)
        partners = choose_partners(hosts, self._begun.domains, self._options.copies)
        return PartCopies(self._ranks, self._session, self._tier, partners, rate).make(slot, self._table)

    def _drain(self) -> CheckpointInfo:
        """Write the staged bytes into the run directory, and try again if that fails."""
        drained: CheckpointInfo | None = None
        try:
            info = retry_drain(self._drain_once, self._note_failure)
            drained = info
        except HoldfastError as error:
            if self._options.on_failure == "raise":
                raise
            if self._session.rank == COORDINATOR_RANK:
                warn_caller(f"{self.path} could not be written, and stays in the local tier: {error}")
            return self._info
        else:
            return info
        finally:
            self._end_drain(drained)
            self._release_slot()

    def _note_failure(self, error: HoldfastError, attempt: int) -> None:
        if self._staging.is_locked and not self._is_committed():
            self._staging.discard()
        self._staging.release()
        self._reporter.report_drain_failed(error, attempt, self._tier.undrained_seconds)

    def _drain_once(self) -> CheckpointInfo:
        """Write the staged bytes into a staging directory, whose name no other attempt has, and commit it."""

        def open_staging(_: list[bytes]) -> bytes:
            if self._is_committed():  # by an attempt that seemed to fail
                return _encode(("", False))
            self._tier.check_not_fenced(self._request.tag)
            attempt = secrets.token_hex(8)
            self._set_attempt(attempt)
            self._clean_up()
            self._staging.create(sum(file.size for file in self._plan.files))
            self._files.create_files()
            return _encode((attempt, self._may_remove_old()))

        _, raw = self._session.vote("preparing the drain", lambda: None, lambda _: b"", open_staging)
        attempt, self._removes_old = msgspec.msgpack.decode(raw, type=tuple[str, bool])
        if not attempt:
            return self._info
        if self._session.rank != COORDINATOR_RANK:
            self._set_attempt(attempt)
        return super().write_and_commit()

    def _publish_checkpoint(self, committed: Manifest) -> None:
        if self._slot is not None:  # this process may have been stopped while another job continued the run
            self._tier.check_not_fenced(self._request.tag)
        super()._publish_checkpoint(committed)
        if self._slot is not None:
            self._tier.check_published(CheckpointInfo.of(self.path, committed))

    def _check_newest(self, committed: Manifest, folder: Path) -> None:
        if self._slot is not None:
            self._tier.check_replaces(self.path, folder)
        super()._check_newest(committed, folder)

    def _set_attempt(self, attempt: str) -> None:
        self._staging = StagingDirectory(self.path, self._hidden_name._replace(id=attempt))

    def _end_drain(self, drained: CheckpointInfo | None) -> None:
        if self._is_draining:
            self._is_draining = False
            self._tier.end_drain(None if drained is None else self._key, drained)

    def _release_slot(self) -> None:
        if self._slot is not None:
            self._tier.slots.unpin(self._slot)
            self._slot = None

    def _roll_back(self, error: BaseException) -> None:
        if not self._is_complete:
            self._tier.forget_tag(self._request.tag)
        self._end_drain(None)
        self._release_slot()
        super()._roll_back(error)


def _describe_shortage(prepared: Sequence[_PreparedTierSave]) -> str:
    """Say which host lacks how much memory; nothing if none does."""
    for rank, one in enumerate(prepared):
        if one.needed:
            return (
                f"rank {rank} needs {format_size(one.needed)} more in the folder of the tier on its host, where "
                f"{format_size(one.free)} are free. The tier needs three times the bytes of a host, and two to three "
                "times those that it gets as copies"
            )
    return ""
