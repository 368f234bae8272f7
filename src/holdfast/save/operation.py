"""The steps of one save, from training objects to a committed checkpoint, on all ranks together.

Every step that can fail on one rank ends in a vote. So no rank continues alone, and all raise the same error.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from holdfast._version import __version__
from holdfast.engine.comm.session import RankGroup
from holdfast.engine.comm.vote import COORDINATOR_RANK
from holdfast.engine.integrity import replicas
from holdfast.engine.integrity.crc_gather import HashedResult, vote_with_fragments
from holdfast.engine.io.commit import ReplacePolicy, StagingDirectory
from holdfast.engine.io.requests import Fragments
from holdfast.engine.io.staging import SAMPLED_CHUNKS, DeferredCopies, StagedTensors
from holdfast.engine.io.staging_memory import Arena
from holdfast.engine.plan.save_plan import EMPTY_PLAN, SavePlan, plan_save
from holdfast.errors import (
    CorruptCheckpointError,
    FormatError,
    HoldfastError,
    NoCheckpointError,
    StorageError,
    TagExistsError,
)
from holdfast.formats.native import RANKS, read_manifest
from holdfast.formats.native import STATE as STATE_FILE
from holdfast.observe.reporter import EventReporter, note_corrupt
from holdfast.observe.warning import warn_caller
from holdfast.ondisk import manifest
from holdfast.ondisk.files import parse_size
from holdfast.ondisk.hidden_names import HiddenName, State
from holdfast.ondisk.manifest import FileRecord, Manifest, Provenance
from holdfast.run.catalog import CheckpointIdentity, next_identity
from holdfast.run.cleanup import clean_up, clean_up_first_saves, delete_checkpoints, expired_checkpoints
from holdfast.run.corruption import CorruptRecord, outdated_corrupt, set_aside_corrupt
from holdfast.run.scan import CheckpointInfo
from holdfast.run.staging_dir import remove_staging
from holdfast.save.negotiation import SaveAgreement, negotiate_save
from holdfast.save.readback import may_lose_writes, read_back
from holdfast.save.request import SaveRequest
from holdfast.save.shard_writer import ShardWriter
from holdfast.state.capture import Capture, build_ranks_file, build_state_file
from holdfast.state.step_only_tensors import step_only_tensors
from holdfast.storage import posix
from holdfast.storage.directories import DirectoryLock, remove_directory, remove_tree, rename_noreplace, rename_path


@dataclass
class SavePlanCache:
    """The plan of the last save. The next save reuses it if the tensor specs of all ranks are unchanged.

    ``key`` identifies the plan, ``saves`` counts the saves that were made with it.
    """

    key: bytes = b""
    plan: SavePlan = EMPTY_PLAN
    saves: int = 0


class _OpenedSave(msgspec.Struct, frozen=True):
    """The coordinator's decision after it has created the staging directory.

    ``identity`` is the new checkpoint's identity, or ``None`` if replicas differ. ``removes_old``: old checkpoints may
    be removed or hidden after the commit. ``reads_back``: the new checkpoint must be read back before that.
    """

    identity: CheckpointIdentity | None = None
    removes_old: bool = False
    reads_back: bool = False


_encode = msgspec.msgpack.Encoder().encode

#: The phase of the vote on staging.
_COPYING = "copying what is to be saved"

#: The states of the hidden directory in which an overwritten checkpoint may be.
_OVERWRITTEN: tuple[State, ...] = ("replaced", "partial", "removed")


class SaveOperation:
    """The steps of one save; each ends in a vote. On failure nothing is left, and all ranks raise the same error.

    :meth:`prepare_save` and :meth:`stage_tensors` must be called in the caller's thread. After that,
    :meth:`complete_staging` and :meth:`write_and_commit` may be called in any thread.
    """

    def __init__(self, request: SaveRequest, ranks: RankGroup, cache: SavePlanCache, timeout: float) -> None:
        self._request, self._ranks, self._cache = request, ranks, cache
        self._session = ranks.open_session(timeout)
        self._captured = Capture()
        self._merged_values: Mapping[str, Any] = {}
        self._lock: DirectoryLock | None = None
        self._identity, self._started_at = CheckpointIdentity(0, "", ""), 0.0
        self._removes_old, self._reads_back = False, False
        #: On rank 0, whether the new checkpoint replaces a corrupt one.
        self._replaces_corrupt = False
        self._plan = EMPTY_PLAN
        self._wait_for_staging: Callable[[], StagedTensors | None] = lambda: None
        self._staged: StagedTensors | None = None
        #: Set when the training objects are no longer needed.
        self.copied = threading.Event()
        self._reporter = EventReporter(
            self.path, request.on_event, is_leader=self._session.rank == COORDINATOR_RANK, began=request.began
        )

    @property
    def path(self) -> Path:
        """The path of the new checkpoint."""
        return self._request.path / str(self._request.tag)  # the tag is checked later, on all ranks together

    @property
    def run_id(self) -> str:
        """The id of the checkpoint's run; empty before :meth:`prepare_save`."""
        return self._identity.run

    def prepare_save(self) -> None:
        """Capture the training state, plan the save, and create the staging directory."""
        agreement = negotiate_save(self._request, self._session, self._ranks.global_ranks(), self._cache.key)
        self._captured, self._merged_values = agreement.captured, agreement.merged_values
        self._identity = self._plan_and_open(agreement)

    def stage_tensors(self, arena: Arena) -> None:
        """Copy the tensors that this rank writes into ``arena``, except those that may be copied later.

        The vote on the copies ends in :meth:`complete_staging`.
        """
        deferred = self._deferred_copies()
        self._wait_for_staging = self._session.begin_on_all(_COPYING, lambda: self._writer.stage(arena, deferred))
        if not self._is_overlapped:
            self._release_tensors()

    def complete_staging(self) -> None:
        """Copy the remaining tensors. Afterwards the training objects may change."""
        self._staged = staged = self._wait_for_staging()

        def copy_deferred() -> None:
            try:
                if staged is not None:
                    staged.copy_deferred(self._plan.tensors)
            finally:
                self._release_tensors()

        if self._is_overlapped:
            self._session.run_on_all(_COPYING, copy_deferred)

    @property
    def _is_overlapped(self) -> bool:
        return self._request.background is not None and self._request.background.staging == "overlapped"

    def _deferred_copies(self) -> DeferredCopies:
        options = self._request.background
        if options is None or not self._is_overlapped:
            return DeferredCopies()
        keys = step_only_tensors(self._captured, self._request.training.optimizer)
        numbers = frozenset(number for number, key in enumerate(self._plan.tensors) if key in keys)
        return DeferredCopies(numbers, sys.maxsize if options.check == "full" else SAMPLED_CHUNKS, self._cache.saves)

    def _release_tensors(self) -> None:
        self._captured.tensors.clear()
        self.copied.set()

    def write_and_commit(self) -> CheckpointInfo:
        """Write the files, commit the checkpoint, and remove the checkpoints that are no longer kept."""
        committed = self._write_files(self._staging_directory, self._identity)
        self._release_lock()
        if self._reads_back:
            self._read_back()
        info = CheckpointInfo.of(self.path, committed)
        self._reporter.report_saved(info.path, info.step, info.nbytes)
        if self._removes_old:
            self._session.run_on_all("removing old checkpoints", self._remove_old_checkpoints)
        return info

    def mark_returned(self) -> float:
        """Record that the call returns to the caller, and return for how many seconds it blocked."""
        return self._reporter.mark_returned()

    def _read_back(self) -> None:
        """Verify the checkpoint as the file system has it. If that fails, withdraw it.

        Raises ``CorruptCheckpointError`` if the stored bytes are not the bytes that were written.
        """
        session = self._session
        try:
            session.run_on_all("reading the checkpoint back", lambda: read_back(self.path, session.rank, session.size))
        except CorruptCheckpointError as error:
            if session.rank == COORDINATOR_RANK:
                self._withdraw_checkpoint()
            raise CorruptCheckpointError(
                f"{self.path} is not what was written, and was withdrawn; older checkpoints are as they were. "
                "Save from one host, or to a file system that keeps the parts of one page that several hosts write: "
                f"{error}"
            ) from error

    def _withdraw_checkpoint(self) -> None:
        """Hide the new checkpoint, and give its name back to the checkpoint that it replaced."""
        rename_path(self.path, self._hidden_path("corrupt"))
        with suppress(HoldfastError):  # it may have replaced nothing
            rename_noreplace(self._hidden_path("replaced"), self.path)

    def leave_session(self) -> None:
        """Leave the session. Rank 0 waits for all other ranks, because its process may host the key-value store."""
        self._session.leave()

    @property
    def _staging_directory(self) -> StagingDirectory:
        return StagingDirectory(self._hidden_path("partial"), self._plan)

    @contextmanager
    def rollback_on_error(self) -> Iterator[None]:
        """Remove the staging directory if a step inside the ``with`` block fails. A committed checkpoint stays."""
        process = os.getpid()
        try:
            yield
        except BaseException as error:
            if os.getpid() != process:  # a listener forked: the save belongs to the parent process
                raise
            has_staging = self._lock is not None
            self._release_lock()
            if has_staging and not self._is_committed():
                remove_staging(self._staging_directory.folder)
            self._reporter.report_failed(error)
            raise

    def _is_committed(self) -> bool:
        try:
            return read_manifest(self.path).id == self._identity.id
        except HoldfastError:
            return False

    def _release_lock(self) -> None:
        self._release_tensors()
        if self._lock is not None:
            self._lock.close()

    def _hidden_path(self, state: State) -> Path:
        """Return the path of this save's staging directory, or of the displaced checkpoint in another ``state``."""
        return self._request.path / HiddenName(self._request.tag, self._identity.run, self._identity.id, state).name

    def _remove_old_checkpoints(self) -> None:
        """Remove the replaced checkpoint and those that are not kept. Failures only warn: the new one is committed."""
        if self._session.rank != COORDINATOR_RANK:
            return
        path, keep, run = self._request.path, self._request.keep, self._identity.run
        try:
            if self._replaces_corrupt:
                rename_path(self._hidden_path("replaced"), self._hidden_path("corrupt"))
                note_corrupt(self.path, self._hidden_path("corrupt"))
            with suppress(StorageError):  # there may be none
                remove_directory(self._hidden_path("replaced"), self._hidden_path("removed"))
            for state in _OVERWRITTEN:
                remove_tree(self._hidden_path(state))
            for hidden in set_aside_corrupt(self._request.corrupt, path, run):
                note_corrupt(path, hidden)
            if keep is not None:
                list(delete_checkpoints(expired_checkpoints(path, run, keep)))
                for hidden in outdated_corrupt(path, run):
                    remove_tree(hidden)
        except Exception as error:  # noqa: BLE001 - the checkpoint is committed, whatever a policy or the disk raises
            warn_caller(f"the checkpoint is saved, but an old one could not be removed: {error}")

    def _plan_and_open(self, agreement: SaveAgreement) -> CheckpointIdentity:
        """Plan, check that replicas are equal, and create the staging directory. Return the checkpoint's identity."""
        cache = self._cache

        def plan_and_hash() -> bytes:
            if agreement.global_spec is not None:
                cache.key = b""
                cache.plan = plan_save(
                    agreement.global_spec, self._session.rank, parse_size(self._request.max_shard_size)
                )
                cache.key, cache.saves = agreement.key, 0
            self._plan = cache.plan
            return self._hash_replicas()

        def open_staging(posted: list[bytes]) -> bytes:
            if not replicas.have_equal_replicas(posted):
                return _encode(_OpenedSave())
            identity = next_identity(self._request.path, self._request.runs)
            clean_up(self._request.path, identity.run)
            clean_up_first_saves(self._request.path, self._request.tag)
            self._identity, self._started_at = identity, round(time.time(), 6)
            self._lock = self._staging_directory.create_directory()
            removes_old = self._request.keep is not None or self._request.overwrite or bool(self._request.corrupt)
            is_unsafe = may_lose_writes(self._request.path, agreement.hosts)
            return _encode(_OpenedSave(identity, removes_old, is_unsafe and removes_old))

        _, raw = self._session.vote("preparing the save", plan_and_hash, lambda digests: digests, open_staging)
        opened = msgspec.msgpack.decode(raw, type=_OpenedSave)
        if opened.identity is None:
            cache.key = b""
            raise self._writer.describe_replica_mismatch()
        cache.saves += 1
        self._removes_old, self._reads_back = opened.removes_old, opened.reads_back
        return opened.identity

    def _hash_replicas(self) -> bytes:
        save = 0 if self._request.replica_check == "full" else self._cache.saves
        digests, seconds = self._writer.hash_replicas(save)
        if self._plan.replicas:
            self._reporter.record_replica_check(seconds)
        return digests

    @property
    def _writer(self) -> ShardWriter:
        return ShardWriter(self._ranks, self._session, self._plan, self._captured.tensors)

    def _write_files(self, staging: StagingDirectory, identity: CheckpointIdentity) -> Manifest:
        """Write this rank's shards. Rank 0 commits when all ranks have written theirs."""
        files = [file.path for file in staging.plan.files]

        def write_shards() -> HashedResult:
            on_moved = self._reporter.progress_counter("save", staging.plan.nbytes).add
            fragments = self._writer.write(staging.folder, files, self._staged, on_moved)
            return HashedResult(fragments, self._captured.rank_values)

        def commit(fragments: Fragments, rank_values: list[bytes]) -> bytes:
            ranks_file = build_ranks_file(rank_values, self._merged_values)
            state_file = build_state_file(self._merged_values, self._captured.shared_values)
            small_files = {**self._captured.small_files, STATE_FILE: state_file, RANKS: ranks_file}
            committed = staging.finalize(fragments, small_files, lambda files: self._build_manifest(identity, files))
            self._publish_checkpoint(staging, committed)
            return manifest.encode_manifest(committed)

        decision = vote_with_fragments(self._session, "writing", write_shards, commit)
        return manifest.decode_manifest(decision, manifest.NAME)

    def _publish_checkpoint(self, staging: StagingDirectory, committed: Manifest) -> None:
        """Rename the staging directory to its final name, which must be free or that of a replaceable checkpoint."""
        corrupt = None if self._request.overwrite else self._request.find_corrupt()
        if self._request.overwrite:
            staging.publish_replacing(self.path, self._replace_policy(partial(self._check_newest, committed)))
        elif corrupt is not None:
            staging.publish_replacing(self.path, self._replace_policy(partial(self._check_corrupt, corrupt)))
            self._replaces_corrupt = True
        else:
            staging.publish(self.path)

    def _replace_policy(self, check: Callable[[Path], None]) -> ReplacePolicy:
        return ReplacePolicy(self._hidden_path("replaced"), self._hidden_path("removed"), check)

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
        with suppress(CorruptCheckpointError, FormatError, NoCheckpointError):
            existing = CheckpointInfo.of(folder, read_manifest(folder))
            if existing.age > CheckpointInfo.of(self.path, committed).age:
                raise TagExistsError(f"another job has saved {self.path} meanwhile; it is newer, and left as it is")

    def _build_manifest(self, identity: CheckpointIdentity, files: dict[str, FileRecord]) -> Manifest:
        step, metrics = self._request.manifest_numbers()
        return Manifest(
            format="holdfast",
            version=manifest.VERSION,
            tag=self._request.tag,
            id=identity.id,
            run=identity.run,
            sequence=identity.sequence,
            time=self._started_at,
            step=step,
            metrics=metrics,
            provenance=Provenance(__version__, str(torch.__version__), platform.python_version(), self._session.size),
            files=files,
        )
