"""An attempt to write a checkpoint into a run directory: a pending directory, which gets its name by one rename.

:mod:`rankless.save.training_content` and :mod:`rankless.save.generation_content` open one for each attempt, on every
rank: see :class:`~rankless.save.run_output.RunOutput` for the votes. Rank 0 begins in the decision of the vote that
prepares; all ranks write, and rank 0 removes old checkpoints, in the thread of the save. The order of the commit must
stay: all files durable, the manifest with them, linked files checked, then one rename, then the removal of old
checkpoints.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rankless.engine.comm.session import WritingRanks
from rankless.engine.comm.vote import COORDINATOR_RANK
from rankless.engine.integrity.base_comparison import FileSamples
from rankless.engine.integrity.crc_gather import HashedResult, vote_with_fragments
from rankless.engine.io.checkpoint_files import NOTHING_UNCHANGED, CheckpointFiles
from rankless.engine.io.requests import KnownFragments, OnBytesMoved, ProviderOf
from rankless.engine.plan.save_plan import EMPTY_PLAN, SavePlan
from rankless.errors import CorruptCheckpointError, FormatError, NoCheckpointError, RanklessError, TagExistsError
from rankless.formats.native import read_manifest
from rankless.observe.reporter import note_corrupt
from rankless.observe.spans import traced
from rankless.observe.warning import warn_or_log
from rankless.ondisk.hidden_names import HiddenName
from rankless.process.prepared_types import prepared
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.cleanup import clean_up, delete_checkpoints, expired_checkpoints
from rankless.run.corruption import CorruptRecord, find_corrupt, set_aside_corrupt
from rankless.run.folder_removal import clean_up_first_saves
from rankless.run.history import KnownCheckpoint, is_newer
from rankless.run.ownership import checkpoint_of
from rankless.run.pending_dir import PendingDirectory
from rankless.run.pending_lock import confirm_lock
from rankless.save.base_checkpoint import (
    BaseCheckpoint,
    BaseFile,
    KnownRun,
    TensorVersions,
    checkpoint_before,
    count_sharing_saves,
    identify_files,
)
from rankless.save.run_output import NO_RECORDS, LiveTensors, NewTag, Records, SavedContent
from rankless.storage import posix
from rankless.storage.atomic_rename import rename_path
from rankless.storage.filesystem_kind import forget_names

if TYPE_CHECKING:
    from rankless.save.base_files import BaseFiles
    from rankless.save.incremental import IncrementalSave

#: The least bytes of a checkpoint that may share anything. Samples, links and hashes take 2 ms, and to write fewer
#: bytes takes less.
_MIN_SHARED = 64 * 2**10


@prepared
class _Samples(msgspec.Struct, frozen=True, array_like=True):
    """A rank's samples of the files of a base, and the id of that."""

    base: str
    files: list[FileSamples]


@prepared
class _BegunFolder(msgspec.Struct, frozen=True, array_like=True):
    """The pending directory that rank 0 has created: the run and the id in its name, and facts for all ranks.

    ``whole`` are the files, by number, that may be unchanged, and ``partial`` the files with some tensors that may be.
    """

    run: str = ""
    id: str = ""
    whole: list[int] = []
    partial: list[int] = []
    #: The files, by number, that are links to files with the same record: they may be unchanged.
    shared: list[int] = []
    #: Whether ranges of files can be cloned, as far as is known.
    clones: bool = True


_encode = msgspec.msgpack.Encoder().encode


class RunFolderOutput:
    """A :class:`rankless.save.run_output.RunOutput` in a run directory on a file system."""

    #: Any ranks of a host may write next to each other.
    grain = None

    def __init__(self, new: NewTag, ranks: WritingRanks, known: KnownRun) -> None:
        self._new, self._session, self._attempt, self._known = new, ranks.session, ranks.attempt, known
        self._path, self._base, self._plan = new.path, known.checkpoint, EMPTY_PLAN
        self.shared_nbytes = 0
        #: The search for unchanged bytes, if there is a base.
        self._incremental: IncrementalSave | None = None
        #: On rank 0, the files of the base that are linked.
        self._base_files: BaseFiles | None = None
        self._unchanged = NOTHING_UNCHANGED
        self._pending = PendingDirectory(self._path, HiddenName(str(new.tag), "", "", "partial"))  # not created
        self._witness: int | None = None
        self._bytes_of: ProviderOf | None = None
        self._versions: TensorVersions = {}
        self._begun = _BegunFolder()
        #: On rank 0, the checkpoint that is written, whether old ones may be removed or hidden after it, whether it
        #: replaces a corrupt one, and its files.
        self._saved: KnownCheckpoint | None = None
        self._removes_old = self._replaces_corrupt = False
        self._committed_files: Mapping[str, BaseFile] = {}
        #: On rank 0, how many saves share with the last full one if this one does.
        self._sharing_saves = 0

    @property
    def _files(self) -> CheckpointFiles:
        return CheckpointFiles(self._pending.path, self._plan)

    def prepare(
        self,
        plan: SavePlan,
        tensors: LiveTensors | None = None,
        witness: int | None = None,
        bytes_of: ProviderOf | None = None,
    ) -> bytes:
        """See :class:`RunOutput`."""
        self._plan, self._witness, self._bytes_of = plan, witness, bytes_of
        if tensors is None:
            return b""
        self._versions, base = tensors.versions, self._base
        if base is None or not self._new.incremental or sum(file.size for file in plan.files) < _MIN_SHARED:
            return b""
        from rankless.save.incremental import IncrementalSave  # noqa: PLC0415 - small and first saves share nothing

        self._incremental = IncrementalSave(self._session, base.path, base.versions)
        self._incremental.set_plan(plan, tensors.tensors, tensors.number)
        samples = self._incremental.sample_files(tensors.frozen, clones=self._known.sharing.clones)
        return _encode(_Samples(base.id, samples))

    def is_committed(self, checkpoint_id: str) -> bool:
        """See :class:`RunOutput`. Raises ``StorageError`` if that cannot be found out."""
        forget_names(self._new.run)
        try:
            return read_manifest(self._path).id == checkpoint_id
        except (CorruptCheckpointError, FormatError, NoCheckpointError):
            return False

    def begin(self, saved: KnownCheckpoint, posted: Sequence[bytes], records: Records = NO_RECORDS) -> bytes:
        """See :class:`RunOutput`: rank 0 only. Each attempt has a pending directory of its own."""
        new = self._new
        found_corrupt = any(record.is_in(new.run / record.tag) for record in new.corrupt)
        self._saved, self._removes_old = saved, new.keep is not None or new.overwrite or found_corrupt
        if self._new.tier is not None:
            self._new.tier.check_not_fenced(self._new.tag)
        name = saved.id if self._attempt == 0 else secrets.token_hex(8)
        self._pending = self._make_pending(saved.run, name)
        self._clean_up(saved.run)
        if records and new.incremental:
            self._begun = _BegunFolder(saved.run, name, shared=self._link_known(saved, records))
        else:
            whole, some = self._create_files([] if self._incremental is None else self._select_samples(saved, posted))
            self._begun = _BegunFolder(saved.run, name, whole, some, clones=self._known.sharing.clones)
        return _encode(self._begun)

    def _make_pending(self, run: str, name: str) -> PendingDirectory:
        return PendingDirectory(self._path, HiddenName(self._new.tag, run, name, "partial"))

    @traced("clean up", "commit")
    def _clean_up(self, run: str) -> None:
        """Remove leftovers of interrupted saves in the run directory."""
        clean_up(self._new.run, run)
        clean_up_first_saves(self._new.run, self._new.tag)

    def _select_samples(self, saved: KnownCheckpoint, posted: Sequence[bytes]) -> list[list[FileSamples]]:
        """Return the samples of all ranks; none if all files are to be written."""
        base = self._base
        saves = 0 if base is None else count_sharing_saves(base, self._new.keep_full_every, saved.sequence)
        if base is None or not all(posted) or not saves:
            return []
        self._sharing_saves = saves
        ranks = [msgspec.msgpack.decode(raw, type=_Samples) for raw in dict.fromkeys(posted)]  # mostly equal ones
        return [rank.files for rank in ranks] if {rank.base for rank in ranks} == {base.id} else []

    @traced("create the files", "write")
    def _link_known(self, saved: KnownCheckpoint, records: Records) -> list[int]:
        """Create the files, and link those that the checkpoint before has with the same record. Return the links."""
        from rankless.save.base_files import BaseFiles  # noqa: PLC0415 - drains only

        base, keep_full_every = checkpoint_before(self._new.run, saved), self._new.keep_full_every
        sizes, equal = [file.size for file in self._plan.files], list[int]()
        is_full = base is None or not count_sharing_saves(base, keep_full_every, saved.sequence)
        if base is not None and sum(sizes) >= _MIN_SHARED and not is_full:
            self._base_files = BaseFiles(base, self._files, self._known.sharing)
            equal = self._base_files.find_equal(records)
        self._pending.create(sum(sizes) - sum(sizes[number] for number in equal))
        linked = [] if self._base_files is None else self._base_files.link_files(equal)
        self._files.create_files(existing=linked)
        return linked

    def _compare_links(self, numbers: Sequence[int]) -> list[int]:
        """Compare the linked files with the bytes of all ranks, in a vote. Return those that are equal.

        Records do not prove it: the job that drains has not seen the files before, and somebody may have changed one.
        """
        from rankless.engine.io.equal_files import find_equal_files  # noqa: PLC0415 - drains only

        def compare() -> bytes:
            bytes_of = self._bytes_of
            files = {number: self._pending.path / self._plan.files[number].path for number in numbers}
            equal = [] if bytes_of is None else find_equal_files(files, self._plan.file_ranges, bytes_of)[0]
            return _encode(equal)

        def keep_equal(posted: list[bytes]) -> bytes:
            equal = set.intersection(*({*msgspec.msgpack.decode(raw, type=list[int])} for raw in posted))
            if self._base_files is not None:
                self._unchanged = self._base_files.keep_links(equal)
            return _encode(sorted(equal))

        _, raw = self._session.vote("comparing with the checkpoint before", compare, bytes, keep_equal)
        return msgspec.msgpack.decode(raw, type=list[int])

    @traced("create the files", "write")
    def _create_files(self, samples: Sequence[Sequence[FileSamples]]) -> tuple[list[int], list[int]]:
        """Create the pending directory and its files.

        Return the files that may be unchanged, which are links: as a whole, and in part.
        """
        sizes = [file.size for file in self._plan.files]
        base = self._base
        if self._incremental is None or base is None or not samples:
            self._pending.create(sum(sizes))
            self._files.create_files()
            return [], []
        chosen = self._incremental.choose_candidates(samples, clones=self._known.sharing.clones)
        self._pending.create(sum(sizes) - sum(sizes[number] for number in chosen.numbers()))
        linked = chosen.restrict_to(self._link_files(base, chosen.numbers()))
        self._files.create_files(existing=set(linked.numbers()))
        written = [file.path for number, file in enumerate(self._plan.files) if number not in linked.numbers()]
        if written:
            self._known.sharing.try_to_clone(base.path / written[0], self._pending.path / written[0])
        return linked.whole, linked.partial

    def _link_files(self, base: BaseCheckpoint, numbers: Sequence[int]) -> Sequence[int]:
        """Link files of the base in the pending directory, on rank 0. Return the numbers of those that are links."""
        from rankless.save.base_files import BaseFiles  # noqa: PLC0415 - as above

        if self._incremental is None or not numbers:
            return ()
        self._base_files = self._incremental.files = BaseFiles(base, self._files, self._known.sharing)
        return self._base_files.link_files(numbers)

    def join(self, begun: bytes) -> None:
        """See :class:`RunOutput`."""
        self._begun = decoded = msgspec.msgpack.decode(begun, type=_BegunFolder)
        if self._session.rank != COORDINATOR_RANK:
            self._pending = self._make_pending(decoded.run, decoded.id)
            self._known.sharing.clones = decoded.clones

    def omit_unchanged(self, *, trusts_versions: bool) -> SavePlan:
        """See :class:`RunOutput`."""
        begun, trusted = self._begun, self._versions if trusts_versions else {}
        if begun.shared:
            from rankless.engine.plan.omitted_ranges import omit_ranges, whole_files  # noqa: PLC0415 - drains only

            files, equal = self._plan.files, self._compare_links(begun.shared)
            self._plan = omit_ranges(self._plan, whole_files(files, equal))
            self.shared_nbytes = sum(files[number].size - files[number].data_start for number in equal)
        if self._incremental is not None and (begun.whole or begun.partial):
            self._plan = self._incremental.omit_unchanged(begun.whole, begun.partial, trusted)
            self.shared_nbytes = self._incremental.shared_nbytes
        return self._plan

    def verify_trusted(self) -> None:
        """See :class:`RunOutput`."""
        if self._incremental is not None:
            self._incremental.verify_trusted()

    def write(self, content: SavedContent, on_moved: OnBytesMoved) -> CheckpointInfo:
        """See :class:`RunOutput`. Rank 0 commits when all ranks have written theirs."""

        def write_share() -> HashedResult:
            if self._session.rank == self._witness:
                confirm_lock(self._pending.path)
            return content.write_files(self._pending.path, on_moved)

        @traced("commit", "commit")
        def commit(fragments: KnownFragments, payloads: list[bytes]) -> bytes:
            content.begin_commit(self._pending.path, payloads)
            small_files = content.build_small_files(payloads)
            unchanged = self._unchanged if self._incremental is None else self._incremental.unchanged
            committed = self._files.finalize(fragments, small_files, content.make_manifest, unchanged)
            files = identify_files(self._pending.path, committed)
            self._committed_files = files if self._base_files is None else self._base_files.check_links(files)
            info = CheckpointInfo.of(self._path, committed)
            self._publish(info)
            return info.encode()  # not the manifest: of a large job it has half a megabyte, and each host reads this

        raw = vote_with_fragments(self._session, "writing", write_share, commit, self._plan.rank_order)
        committed = CheckpointInfo.decode(self._path, raw)
        if self._known.checkpoint is self._base:  # else a load has replaced it
            self._known.checkpoint = BaseCheckpoint(
                self._path,
                committed.id,
                committed.sequence,
                self._committed_files,
                self._versions,
                self._sharing_saves if self.shared_nbytes else 0,
            )
        return committed

    @traced("rename", "commit")
    def _publish(self, saved: CheckpointInfo) -> None:
        """Rename the pending directory to its final name, which must be free or name a replaceable checkpoint.

        Nothing is done if an attempt that seemed to fail has committed the checkpoint. Rank 0 only.
        """
        tier = self._new.tier
        if tier is not None:  # this process may have been stopped while another job continued the run
            tier.check_not_fenced(self._new.tag)
        try:
            self._take_tag(saved)
        except TagExistsError:
            if not self.is_committed(saved.id):
                raise
            self._pending.discard()
        if tier is not None:
            tier.check_published(saved)

    def _take_tag(self, saved: CheckpointInfo) -> None:
        new, is_replaceable = self._new, partial(self._check_replaceable, saved)
        corrupt = find_corrupt(new.corrupt, new.run, new.tag)
        if corrupt is not None and new.overwrite:
            self._pending.replace(partial(self._check_overwritten, saved, corrupt))
        elif new.overwrite:
            self._pending.replace_tag(saved, is_replaceable)
        elif corrupt is not None:
            self._pending.replace(partial(self._check_corrupt, corrupt))
            self._replaces_corrupt = True
        else:
            self._pending.publish_tag(saved)

    def _check_overwritten(self, saved: CheckpointInfo, corrupt: CorruptRecord, folder: Path) -> None:
        """Check as :meth:`_check_replaceable`. Note whether a load found the replaced checkpoint corrupt: it stays."""
        self._check_replaceable(saved, folder)
        self._replaces_corrupt = corrupt.is_in(folder)

    def _check_corrupt(self, corrupt: CorruptRecord, folder: Path) -> None:
        """Raise ``TagExistsError`` if ``folder`` is not the checkpoint that was found corrupt.

        Another job may have saved under the tag meanwhile.
        """
        if posix.path_exists(folder) and not corrupt.is_in(folder):
            raise TagExistsError(
                f"{self._path} was changed while this checkpoint was being saved; it was left as it is"
            )

    def _check_replaceable(self, saved: CheckpointInfo, folder: Path) -> None:
        """Raise ``TagExistsError`` if ``folder`` is no checkpoint of ours, or one that is not older.

        This process may have been suspended while another job continued the run.
        """
        if self._new.tier is not None:
            self._new.tier.check_replaces(self._path, folder)
        checkpoint_of(self._new.tag).check(folder)
        with suppress(CorruptCheckpointError, FormatError, NoCheckpointError):
            existing = CheckpointInfo.of(folder, read_manifest(folder))
            if existing.id == saved.id or is_newer(existing, saved):
                raise TagExistsError(f"another job has saved {self._path} meanwhile; it is newer, and left as it is")

    def remove_old(self) -> None:
        """See :class:`RunOutput`."""
        if self._saved is not None and self._removes_old:
            self._remove_old(self._saved)

    @traced("remove old checkpoints", "step")
    def _remove_old(self, saved: KnownCheckpoint) -> None:
        new = self._new
        try:
            if self._replaces_corrupt:
                hidden = self._new.run / self._pending.name.with_state("corrupt").name
                rename_path(self._pending.displaced_path, hidden)
                note_corrupt(self._path, hidden)
            self._pending.remove_displaced()
            for hidden in set_aside_corrupt(new.corrupt, new.run, saved.run):
                note_corrupt(self._path, hidden)
            if new.keep is not None:
                expired = expired_checkpoints(new.run, saved.run, new.keep, incarnation=saved.incarnation)
                list(delete_checkpoints(expired))
        except Exception as error:  # noqa: BLE001 - the checkpoint is committed, whatever a policy or the disk raises
            warn_or_log(f"the checkpoint is saved, but an old one could not be removed: {error}")
        finally:
            self._pending.release()

    def discard(self) -> None:
        """See :class:`RunOutput`."""
        self._known.checkpoint = None  # the next save writes everything
        if self._pending.is_locked and not self._is_surely_committed():
            self._pending.discard()
        self._pending.release()

    def _is_surely_committed(self) -> bool:
        with suppress(RanklessError):
            return self._saved is not None and self.is_committed(self._saved.id)
        return False
