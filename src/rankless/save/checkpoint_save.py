"""A save of a whole checkpoint: its plan, its commit, and the removal of old checkpoints after it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from rankless.engine.comm.session import RankGroup
from rankless.engine.comm.vote import COORDINATOR_RANK
from rankless.engine.integrity import replica_comparison
from rankless.engine.integrity.base_comparison import FileSamples
from rankless.engine.integrity.crc_gather import HashedResult, vote_with_fragments
from rankless.engine.io.checkpoint_files import CheckpointFiles
from rankless.engine.io.requests import Fragments
from rankless.engine.plan.omitted_ranges import omit_ranges
from rankless.engine.plan.save_plan import plan_save
from rankless.errors import (
    CorruptCheckpointError,
    FormatError,
    NoCheckpointError,
    RanklessError,
    TagExistsError,
)
from rankless.formats.native import read_manifest
from rankless.observe.reporter import note_corrupt
from rankless.observe.spans import traced
from rankless.observe.warning import warn_caller
from rankless.ondisk import manifest
from rankless.ondisk.data_files import parse_size
from rankless.ondisk.hidden_names import HiddenName
from rankless.ondisk.manifest import Manifest
from rankless.process.prepared_types import prepared
from rankless.run.catalog import CheckpointIdentity
from rankless.run.cleanup import clean_up, clean_up_first_saves, delete_checkpoints, expired_checkpoints
from rankless.run.corruption import CorruptRecord, set_aside_corrupt
from rankless.run.history import is_newer
from rankless.run.ownership import checkpoint_of
from rankless.run.pending_dir import PendingDirectory
from rankless.run.pending_lock import confirm_lock
from rankless.run.scan import CheckpointInfo
from rankless.save.base_checkpoint import Base, BaseCheckpoint, BaseFile, TensorVersions, identify_files
from rankless.save.incremental import Candidates, IncrementalSave
from rankless.save.save_negotiation import SaveAgreement
from rankless.save.save_request import SaveRequest
from rankless.save.training_save import SavePlanCache, TrainingSave
from rankless.storage import posix
from rankless.storage.atomic_rename import rename_path


@prepared
class _PreparedSave(msgspec.Struct, frozen=True, array_like=True):
    """The result of a rank's preparation: the digests of its replicas, and its samples of the files of a base."""

    digests: bytes
    base: str = ""
    samples: list[FileSamples] = []


@prepared
class _OpenedSave(msgspec.Struct, frozen=True):
    """The coordinator's decision after it has created the pending directory.

    ``identity`` is the new checkpoint's identity, or ``None`` if replicas differ. ``removes_old``: old checkpoints may
    be removed or hidden after the commit. ``candidates`` are files that may be unchanged.
    """

    identity: CheckpointIdentity | None = None
    removes_old: bool = False
    candidates: Candidates = Candidates()


_encode = msgspec.msgpack.Encoder().encode


class CheckpointSave(TrainingSave):
    """A save of a training state as one checkpoint of a run directory."""

    def __init__(
        self, request: SaveRequest, ranks: RankGroup, cache: SavePlanCache, base: Base, timeout: float
    ) -> None:
        super().__init__(request, ranks, cache, timeout)
        self._next_base = base
        self._pending = PendingDirectory(self.path)  # its name is that of the checkpoint once this has an id
        self._base = base.checkpoint
        is_incremental = request.options.incremental is True  # other values are refused in the vote
        self._incremental = IncrementalSave(self._session, self._base if is_incremental else None, cache.sharing)
        self._versions: TensorVersions = {}
        #: On rank 0, whether the new checkpoint replaces a corrupt one.
        self._replaces_corrupt = False
        #: On rank 0, the files of the new checkpoint.
        self._committed_files: Mapping[str, BaseFile] = {}

    def _plan_and_open(self, agreement: SaveAgreement) -> None:
        """Plan, check that replicas are equal, and create the pending directory and its files."""
        candidates = self._open_pending(agreement)
        if candidates.numbers():
            trusts_versions = self._is_overlapped and self._request.options.staging_check != "full"
            omitted = self._incremental.find_unchanged(candidates, self._versions if trusts_versions else {})
            self._plan = omit_ranges(self._plan, omitted)

    def complete_copies(self) -> None:
        """See :class:`SaveOperation`. Then check that tensors that were trusted to be unchanged are."""
        super().complete_copies()
        self._incremental.verify_trusted()

    def write_and_commit(self) -> CheckpointInfo:
        """Write the files, commit the checkpoint, and remove the checkpoints that are no longer kept."""
        committed = self._write_files()
        self._release_tensors()
        info = CheckpointInfo.of(self.path, committed)
        if self._next_base.checkpoint is self._base:  # else a load has replaced it
            self._next_base.checkpoint = BaseCheckpoint(
                self.path, committed.id, committed.sequence, self._committed_files, self._versions
            )
        self._reporter.report_saved(info.path, info.step, info.nbytes, self._incremental.shared_nbytes)
        if self._removes_old:
            self._session.run_on_all("removing old checkpoints", self._remove_old_checkpoints)
        return info

    def _roll_back(self, error: BaseException) -> None:
        self._next_base.checkpoint = None  # the next save writes everything
        if self._pending.is_locked and not self._is_committed():
            self._pending.discard()
        self._pending.release()
        self._reporter.report_failed(error)

    def _is_committed(self) -> bool:
        try:
            return read_manifest(self.path).id == self._identity.id
        except RanklessError:
            return False

    @property
    def _corrupt_path(self) -> Path:
        """The hidden path that keeps a corrupt checkpoint of this tag."""
        return self._request.path / self._hidden_name.with_state("corrupt").name

    @property
    def _hidden_name(self) -> HiddenName:
        return HiddenName(self._request.tag, self._identity.run, self._identity.id, "partial")

    def _set_identity(self, identity: CheckpointIdentity) -> None:
        super()._set_identity(identity)
        self._pending = PendingDirectory(self.path, self._hidden_name)

    def _remove_old_checkpoints(self) -> None:
        """Remove the replaced checkpoint and those that are not kept. Failures only warn: the new one is committed."""
        if self._session.rank != COORDINATOR_RANK:
            return
        path, keep, identity = self._request.path, self._request.keep, self._identity
        try:
            if self._replaces_corrupt:
                rename_path(self._pending.displaced_path, self._corrupt_path)
                note_corrupt(self.path, self._corrupt_path)
            self._pending.remove_displaced()
            for hidden in set_aside_corrupt(self._request.corrupt, path, identity.run):
                note_corrupt(path, hidden)
            if keep is not None:
                expired = expired_checkpoints(path, identity.run, keep, incarnation=identity.incarnation)
                list(delete_checkpoints(expired))
        except Exception as error:  # noqa: BLE001 - the checkpoint is committed, whatever a policy or the disk raises
            warn_caller(f"the checkpoint is saved, but an old one could not be removed: {error}")
        finally:
            self._pending.release()

    def _open_pending(self, agreement: SaveAgreement) -> Candidates:
        """Plan, and create the files. Return those that may be unchanged, which are links of files of the base."""
        cache, request = self._cache, self._request

        def plan_and_compare() -> _PreparedSave:
            self._update_plan(agreement)
            self._incremental.set_plan(self._plan, self._captured.tensors, cache.saves)
            return _PreparedSave(self._hash_replicas(), *self._incremental.sample_files(self._captured.frozen))

        def open_pending(posted: list[bytes]) -> bytes:
            prepared = [msgspec.msgpack.decode(raw, type=_PreparedSave) for raw in posted]
            if not replica_comparison.have_equal_replicas([rank.digests for rank in prepared]):
                return _encode(_OpenedSave())
            identity = self._choose_identity()
            self._set_identity(identity)
            self._started_at = round(time.time(), 6)
            self._clean_up()
            base, samples = self._base, [rank.samples for rank in prepared]
            is_shared = base is not None and {rank.base for rank in prepared} == {base.id}
            if base is None or not is_shared or base.is_full_due(identity.sequence, request.options.keep_full_every):
                samples = []
            candidates = self._create_files(samples)
            return _encode(_OpenedSave(identity, self._may_remove_old(), candidates))

        _, raw = self._session.vote("preparing the save", plan_and_compare, _encode, open_pending)
        opened = msgspec.msgpack.decode(raw, type=_OpenedSave)
        if opened.identity is None:
            cache.key = b""
            raise self._writer.describe_replica_mismatch()
        cache.saves += 1
        if self._identity != opened.identity:
            self._set_identity(opened.identity)
        self._removes_old = opened.removes_old
        return opened.candidates

    @traced("clean up", "commit")
    def _clean_up(self) -> None:
        """Remove what interrupted saves have left in the run directory, on rank 0."""
        request = self._request
        clean_up(request.path, self._identity.run)
        clean_up_first_saves(request.path, request.tag)

    def _may_remove_old(self) -> bool:
        """Return whether old checkpoints may be removed or hidden after the commit, on rank 0."""
        request = self._request
        if request.keep is not None or request.overwrite:
            return True
        return any(record.is_in(request.path / record.tag) for record in request.corrupt)

    def _update_plan(self, agreement: SaveAgreement) -> None:
        """Plan the save, unless the plan of an earlier one is still right."""
        cache = self._cache
        if agreement.global_spec is not None:
            cache.key = b""
            limit = parse_size(self._request.options.max_shard_size)
            cache.plan = plan_save(agreement.global_spec, self._session.rank, limit, agreement.host_of)
            cache.key, cache.saves = agreement.key, 0
            hosts = list(enumerate(agreement.host_of))
            cache.witness = next((rank for rank, host in hosts if host != agreement.host_of[0]), None)
        self._plan = cache.plan
        self._versions = {key: self._captured.tensors[key].version for key in sorted(self._captured.frozen)}

    @traced("create the files", "write")
    def _create_files(self, samples: Sequence[Sequence[FileSamples]]) -> Candidates:
        """Create the pending directory and its files. Return the files that may be unchanged, which are links.

        ``samples`` are those of all ranks; empty if all files are to be written.
        """
        chosen = self._incremental.choose_candidates(samples)
        numbers = set(chosen.numbers())
        self._pending.create(sum(file.size for number, file in enumerate(self._plan.files) if number not in numbers))
        candidates = self._incremental.link_files(self._files, chosen)
        self._files.create_files(existing=set(candidates.numbers()))
        return candidates

    @property
    def _files(self) -> CheckpointFiles:
        return CheckpointFiles(self._pending.path, self._plan)

    def _write_files(self) -> Manifest:
        """Write this rank's shards. Rank 0 commits when all ranks have written theirs."""
        self._reporter.begin_phase("write")

        def write_shards() -> HashedResult:
            if self._session.rank == self._cache.witness:
                confirm_lock(self._pending.path)
            paths = [file.path for file in self._plan.files]
            on_moved = self._reporter.progress_counter("save", self._plan.nbytes).add
            fragments = self._writer.write(self._pending.path, paths, self._staged, on_moved)
            return HashedResult(fragments, self._captured.rank_values)

        @traced("commit", "commit")
        def commit(fragments: Fragments, rank_values: list[bytes]) -> bytes:
            self._reporter.begin_phase("commit")
            small_files = self._build_small_files(rank_values)
            committed = self._files.finalize(fragments, small_files, self._build_manifest, self._incremental.unchanged)
            self._committed_files = self._incremental.check_links(identify_files(self._pending.path, committed))
            self._publish_checkpoint(committed)
            return manifest.encode_manifest(committed)

        decision = vote_with_fragments(self._session, "writing", write_shards, commit, self._plan.rank_order)
        return manifest.decode_manifest(decision, manifest.NAME)

    @traced("rename", "commit")
    def _publish_checkpoint(self, committed: Manifest) -> None:
        """Rename the pending directory to its final name, which must be free or that of a replaceable checkpoint."""
        corrupt = self._request.find_corrupt()
        if self._request.overwrite and corrupt is not None:
            self._pending.replace(partial(self._check_newest, committed))
        elif self._request.overwrite:
            self._pending.replace_tag(committed, partial(self._check_newest, committed))
        elif corrupt is not None:
            self._pending.replace(partial(self._check_corrupt, corrupt))
            self._replaces_corrupt = True
        else:
            self._pending.publish_tag(committed)

    def _check_corrupt(self, corrupt: CorruptRecord, folder: Path) -> None:
        """Raise ``TagExistsError`` if ``folder`` is not the checkpoint that was found corrupt.

        Another job may have saved under the tag meanwhile.
        """
        if posix.path_exists(folder) and not corrupt.is_in(folder):
            raise TagExistsError(f"{self.path} was changed while this checkpoint was being saved; it was left as it is")

    def _check_newest(self, committed: Manifest, folder: Path) -> None:
        """Raise ``TagExistsError`` if the checkpoint in ``folder`` is newer than this one.

        This process may have been suspended while another job continued the run.
        """
        checkpoint_of(self._request.tag).check(folder)
        with suppress(CorruptCheckpointError, FormatError, NoCheckpointError):
            existing = CheckpointInfo.of(folder, read_manifest(folder))
            if is_newer(existing, CheckpointInfo.of(self.path, committed)):
                raise TagExistsError(f"another job has saved {self.path} meanwhile; it is newer, and left as it is")
