"""One save, from training objects to a committed checkpoint, on all ranks together.

Everything that can fail on one rank comes before a vote: no rank goes on alone, and all raise the same error.
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
from holdfast.engine.plan.save_plan import NOTHING, SavePlan, plan_save
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
from holdfast.save.readback import is_unsafe, read_back
from holdfast.save.request import SaveRequest
from holdfast.save.shard_writer import ShardWriter
from holdfast.state.capture import Capture, ranks_file, state_file
from holdfast.state.step_only_tensors import step_only_tensors
from holdfast.storage import posix
from holdfast.storage.directories import DirectoryLock, remove_directory, remove_tree, rename_noreplace, rename_path


@dataclass
class SavePlanCache:
    """The plan of the last save, which the next one uses if no rank's tensors have changed."""

    key: bytes = b""
    plan: SavePlan = NOTHING
    saves: int = 0


class _OpenedSave(msgspec.Struct, frozen=True):
    """What tells the checkpoint whose draft rank 0 has opened; nothing where replicas differ.

    ``tidies``: whether old checkpoints may go, or make way, once it is committed; ``reads_back``: whether not before
    it has been read back.
    """

    successor: CheckpointIdentity | None = None
    tidies: bool = False
    reads_back: bool = False


_encode = msgspec.msgpack.Encoder().encode

#: What ranks do while they stage.
_COPYING = "copying what is to be saved"

#: Where an overwritten checkpoint may be.
_OVERWRITTEN: tuple[State, ...] = ("replaced", "partial", "removed")


class SaveOperation:
    """The steps of one save; each ends in a vote. On failure nothing is left, and all ranks raise the same error.

    :meth:`begin` and :meth:`stage` belong to the caller's thread; :meth:`complete` and :meth:`finish` to any, once the
    save is staged.
    """

    def __init__(self, request: SaveRequest, ranks: RankGroup, cache: SavePlanCache, timeout: float) -> None:
        self._request, self._ranks, self._cache = request, ranks, cache
        self._session = ranks.session(timeout)
        self._captured = Capture()
        self._merged: Mapping[str, Any] = {}
        self._lock: DirectoryLock | None = None
        self._following, self._begun = CheckpointIdentity(0, "", ""), 0.0
        self._tidies, self._reads_back = False, False
        #: On rank 0, whether what had the tag was corrupt.
        self._replaces_corrupt = False
        self._plan = NOTHING
        self._staging: Callable[[], StagedTensors | None] = lambda: None
        self._staged: StagedTensors | None = None
        #: Set when nothing of the training objects is needed any more.
        self.copied = threading.Event()
        #: What is told of it.
        self.telling = EventReporter(
            self.path, request.on_event, is_leader=self._session.rank == COORDINATOR_RANK, began=request.began
        )

    @property
    def path(self) -> Path:
        """Where the checkpoint will be."""
        return self._request.path / str(self._request.tag)  # which is checked later, on all ranks together

    @property
    def run(self) -> str:
        """The id of the run that the checkpoint is of, once the save has begun."""
        return self._following.run

    def begin(self) -> None:
        """Look at what is to be saved, plan, and open the draft."""
        agreement = negotiate_save(self._request, self._session, self._ranks.global_ranks(), self._cache.key)
        self._captured, self._merged = agreement.captured, agreement.merged
        self._following = self._prepare(agreement)

    def stage(self, arena: Arena) -> None:
        """Copy what this rank will write, but for what may be copied later. Whether all could is learnt later, too."""
        later = self._later()
        self._staging = self._session.begin_all(_COPYING, lambda: self._moving.stage(arena, later))
        if not self._is_overlapped:
            self._let_go()

    def complete(self) -> None:
        """Copy the rest. Afterwards the training objects may change."""
        self._staged = staged = self._staging()

        def work() -> None:
            try:
                if staged is not None:
                    staged.complete(self._plan.tensors)
            finally:
                self._let_go()

        if self._is_overlapped:
            self._session.all(_COPYING, work)

    @property
    def _is_overlapped(self) -> bool:
        return self._request.background is not None and self._request.background.staging == "overlapped"

    def _later(self) -> DeferredCopies:
        how = self._request.background
        if how is None or not self._is_overlapped:
            return DeferredCopies()
        keys = step_only_tensors(self._captured, self._request.training.optimizer)
        numbers = frozenset(number for number, key in enumerate(self._plan.tensors) if key in keys)
        return DeferredCopies(numbers, sys.maxsize if how.check == "full" else SAMPLED_CHUNKS, self._cache.saves)

    def _let_go(self) -> None:
        self._captured.parts.clear()
        self.copied.set()

    def finish(self) -> CheckpointInfo:
        """Write, commit, and remove what is no longer kept."""
        committed = self._write(self._draft, self._following)
        self._close()
        if self._reads_back:
            self._read_back()
        info = CheckpointInfo.of(self.path, committed)
        self.telling.saved(info.path, info.step, info.nbytes)
        if self._tidies:
            self._session.all("removing old checkpoints", self._tidy)
        return info

    def returned(self) -> float:
        """Note that the caller goes on. Returns for how many seconds it was kept."""
        return self.telling.returned()

    def _read_back(self) -> None:
        """Make sure that the file system has what was written, or withdraw it. Raises ``CorruptCheckpointError``."""
        session = self._session
        try:
            session.all("reading the checkpoint back", lambda: read_back(self.path, session.rank, session.size))
        except CorruptCheckpointError as error:
            if session.rank == COORDINATOR_RANK:
                self._withdraw()
            raise CorruptCheckpointError(
                f"{self.path} is not what was written, and was withdrawn; older checkpoints are as they were. "
                f"Save from one host, or into a file system that keeps what several write into one page: {error}"
            ) from error

    def _withdraw(self) -> None:
        """Take the name from the new checkpoint, and give it back to what it has replaced."""
        rename_path(self.path, self._hidden("corrupt"))
        with suppress(HoldfastError):  # it may have replaced nothing
            rename_noreplace(self._hidden("replaced"), self.path)

    def part(self) -> None:
        """Wait until all ranks know how it ended: rank 0's process may hold the store that tells them."""
        self._session.part()

    @property
    def _draft(self) -> StagingDirectory:
        return StagingDirectory(self._hidden("partial"), self._plan)

    @contextmanager
    def undone_on_failure(self) -> Iterator[None]:
        """Leave no draft where a step fails. What is committed stays."""
        process = os.getpid()
        try:
            yield
        except BaseException as error:
            if os.getpid() != process:  # forked meanwhile, by a listener: the save is the other process's
                raise
            begun = self._lock is not None
            self._close()
            if begun and not self._is_committed():
                remove_staging(self._draft.folder)
            self.telling.failed(error)
            raise

    def _is_committed(self) -> bool:
        try:
            return read_manifest(self.path).id == self._following.id
        except HoldfastError:
            return False

    def _close(self) -> None:
        self._let_go()
        if self._lock is not None:
            self._lock.close()

    def _hidden(self, state: State) -> Path:
        """The save's folder before it is a checkpoint, or that of the checkpoint that it replaces."""
        return self._request.path / HiddenName(self._request.tag, self._following.run, self._following.id, state).name

    def _tidy(self) -> None:
        """What was replaced and what is not kept goes. The new checkpoint stands, whatever happens to the old ones."""
        if self._session.rank != COORDINATOR_RANK:
            return
        path, keep, following = self._request.path, self._request.keep, self._following
        try:
            if self._replaces_corrupt:
                rename_path(self._hidden("replaced"), self._hidden("corrupt"))
                note_corrupt(self.path, self._hidden("corrupt"))
            with suppress(StorageError):  # there may be none
                remove_directory(self._hidden("replaced"), self._hidden("removed"))
            for state in _OVERWRITTEN:
                remove_tree(self._hidden(state))
            for hidden in set_aside_corrupt(self._request.corrupt, path, following.run):
                note_corrupt(path, hidden)
            if keep is not None:
                list(delete_checkpoints(expired_checkpoints(path, following.run, keep)))
                for hidden in outdated_corrupt(path, following.run):
                    remove_tree(hidden)
        except Exception as error:  # noqa: BLE001 - the checkpoint stands, whatever a policy or the disk says
            warn_caller(f"the checkpoint is saved, but an old one could not be removed: {error}")

    def _prepare(self, agreement: SaveAgreement) -> CheckpointIdentity:
        """Plan, prove that replicas are equal, and open the draft. Returns what tells the checkpoint."""
        cache = self._cache

        def work() -> bytes:
            if agreement.membership is not None:
                cache.key = b""
                cache.plan = plan_save(
                    agreement.membership, self._session.rank, parse_size(self._request.max_shard_size)
                )
                cache.key, cache.saves = agreement.key, 0
            self._plan = cache.plan
            return self._hash_replicas()

        def decide(posted: list[bytes]) -> bytes:
            if not replicas.have_equal_replicas(posted):
                return _encode(_OpenedSave())
            following = next_identity(self._request.path, self._request.runs)
            clean_up(self._request.path, following.run)
            clean_up_first_saves(self._request.path, self._request.tag)
            self._following, self._begun = following, round(time.time(), 6)
            self._lock = self._draft.open()
            tidies = self._request.keep is not None or self._request.overwrite or bool(self._request.corrupt)
            unsafe = is_unsafe(self._request.path, agreement.hosts)
            return _encode(_OpenedSave(following, tidies, unsafe and tidies))

        _, raw = self._session.vote("preparing the save", work, lambda own: own, decide)
        opened = msgspec.msgpack.decode(raw, type=_OpenedSave)
        if opened.successor is None:
            cache.key = b""
            raise self._moving.differing()
        cache.saves += 1
        self._tidies, self._reads_back = opened.tidies, opened.reads_back
        return opened.successor

    def _hash_replicas(self) -> bytes:
        save = 0 if self._request.replica_check == "full" else self._cache.saves
        digests, seconds = self._moving.hash_replicas(save)
        if self._plan.replicas:
            self.telling.compared(seconds)
        return digests

    @property
    def _moving(self) -> ShardWriter:
        return ShardWriter(self._ranks, self._session, self._plan, self._captured.parts)

    def _write(self, draft: StagingDirectory, following: CheckpointIdentity) -> Manifest:
        """Write this rank's share; rank 0 commits when all have written theirs."""
        files = [file.path for file in draft.plan.files]

        def work() -> HashedResult:
            moved = self.telling.moving("save", draft.plan.nbytes).add
            return HashedResult(self._moving.write(draft.folder, files, self._staged, moved), self._captured.own)

        def decide(fragments: Fragments, posted: list[bytes]) -> bytes:
            own = ranks_file(posted, self._merged)
            shared = state_file(self._merged, self._captured.shared)
            small = {**self._captured.small, STATE_FILE: shared, RANKS: own}
            described = draft.complete(fragments, small, lambda files: self._describe(following, files))
            self._publish(draft, described)
            return manifest.encode_manifest(described)

        return manifest.decode_manifest(vote_with_fragments(self._session, "writing", work, decide), manifest.NAME)

    def _publish(self, draft: StagingDirectory, described: Manifest) -> None:
        """Give the draft its name, if it is free or its owner makes way."""
        corrupt = None if self._request.overwrite else self._request.find_corrupt()
        if self._request.overwrite:
            draft.overwrite(self.path, self._overwrite(partial(self._check_newest, described)))
        elif corrupt is not None:
            draft.overwrite(self.path, self._overwrite(partial(self._check_corrupt, corrupt)))
            self._replaces_corrupt = True
        else:
            draft.publish(self.path)

    def _overwrite(self, check: Callable[[Path], None]) -> ReplacePolicy:
        return ReplacePolicy(self._hidden("replaced"), self._hidden("removed"), check)

    def _check_corrupt(self, corrupt: CorruptRecord, folder: Path) -> None:
        """Only what was found corrupt makes way: another job may have saved under the tag meanwhile."""
        if posix.path_exists(folder) and not corrupt.is_in(folder):
            raise TagExistsError(f"{self.path} was changed while this checkpoint was being saved; it was left as it is")

    def _check_newest(self, described: Manifest, folder: Path) -> None:
        """Only older ones are replaced: this process may have been stopped, and another job have gone on meanwhile."""
        with suppress(CorruptCheckpointError, FormatError, NoCheckpointError):
            there = CheckpointInfo.of(folder, read_manifest(folder))
            if there.age > CheckpointInfo.of(self.path, described).age:
                raise TagExistsError(f"another job has saved {self.path} meanwhile; it is newer, and left as it is")

    def _describe(self, following: CheckpointIdentity, files: dict[str, FileRecord]) -> Manifest:
        step, metrics = self._request.numbers()
        return Manifest(
            format="holdfast",
            version=manifest.VERSION,
            tag=self._request.tag,
            id=following.id,
            run=following.run,
            sequence=following.sequence,
            time=self._begun,
            step=step,
            metrics=metrics,
            provenance=Provenance(__version__, str(torch.__version__), platform.python_version(), self._session.size),
            files=files,
        )
