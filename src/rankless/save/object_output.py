"""An attempt to write a checkpoint into a run in an object store: uploads by all ranks, and a pointer to the result.

Nothing is replaced and nothing is renamed: see :mod:`rankless.run.object_run`. If the save dies at any moment, readers
still see the checkpoint before. Its uploads stay below a name of their own, until they are cleaned up.

Saves and drains open one for each attempt, on every rank: see :class:`~rankless.save.run_output.RunOutput` for the
votes. The order must stay: files complete, the manifest last, then the pointer, then removals. A folder that may have a
pointer is not deleted.
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from rankless.engine.comm.session import WritingRanks
from rankless.engine.comm.vote import COORDINATOR_RANK
from rankless.engine.io import upload_parts
from rankless.engine.io.requests import OnBytesMoved, ProviderOf
from rankless.engine.plan.save_plan import EMPTY_PLAN, SavePlan
from rankless.engine.plan.writer_cells import CellGrain
from rankless.errors import StateError, StorageError
from rankless.observe.warning import warn_caller
from rankless.ondisk import manifest
from rankless.ondisk.manifest import FileRecord, Manifest
from rankless.process.prepared_types import prepared
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.claims import Claim, check_not_superseded
from rankless.run.corruption import find_corrupt
from rankless.run.history import KnownCheckpoint
from rankless.run.pointers import find_tag
from rankless.run.stored_history import read_history
from rankless.save.base_checkpoint import KnownRun, TensorVersions, UploadedBase, count_sharing_saves
from rankless.save.object_publication import UNCHECKED, ObjectPublication, PublicationChecks
from rankless.save.object_upload import ObjectUpload, note_of
from rankless.save.run_output import NO_RECORDS, LiveTensors, NewTag, Records, SavedContent
from rankless.storage.object_path import ObjectPath

if TYPE_CHECKING:
    from rankless.save.copied_files import CopiedFiles
    from rankless.save.incremental import IncrementalSave


@prepared
class _BegunUpload(msgspec.Struct, frozen=True, array_like=True):
    """The result of rank 0: the id in the name of the folder, and the id of each upload; empty without one."""

    folder_id: str
    uploads: list[str]
    #: The files, by number, that may be unchanged. If there are some, the uploads begin later.
    unchanged: list[int] = []


@prepared
class _Unchanged(msgspec.Struct, frozen=True, array_like=True):
    """The files, by number, with tensors that this rank has not seen change since the base was saved; the base's id."""

    base: str
    files: list[int]


class _OpenUpload(NamedTuple):
    """The upload of the files, and the publication of their folder."""

    upload: ObjectUpload
    publication: ObjectPublication


_encode = msgspec.msgpack.Encoder().encode


class RunObjectOutput:
    """A :class:`rankless.save.run_output.RunOutput` in an object store."""

    def __init__(self, new: NewTag, run: ObjectPath, ranks: WritingRanks, known: KnownRun) -> None:
        self._new, self._run, self._ranks, self._known = new, run, ranks, known
        self._plan, self._base, self.shared_nbytes = EMPTY_PLAN, known.uploaded, 0
        self._versions: TensorVersions = {}
        #: The search for unchanged bytes, if there is a base, and on rank 0 the object that lets the store copy them.
        self._incremental: IncrementalSave | None = None
        self._copies: CopiedFiles | None = None
        self._begun = _BegunUpload("", [])
        #: On rank 0, how many saves share with the last full one if this one does.
        self._sharing_saves = 0
        self._parts: _OpenUpload | None = None
        #: On rank 0, the checkpoint that is written.
        self._saved: KnownCheckpoint | None = None

    @property
    def grain(self) -> CellGrain:
        """See :class:`RunOutput`. Each part of an upload has one sender."""
        return upload_parts.GRAIN  # as it is at each save: tests upload small parts

    def prepare(
        self,
        plan: SavePlan,
        tensors: LiveTensors | None = None,
        witness: int | None = None,
        bytes_of: ProviderOf | None = None,
    ) -> bytes:
        """See :class:`RunOutput`."""
        del witness, bytes_of
        self._plan, base = plan, self._base
        if tensors is None:
            return b""
        self._versions = tensors.versions
        if base is None or not self._new.incremental:
            return b""
        from rankless.save.incremental import IncrementalSave  # noqa: PLC0415 - first saves share nothing

        self._incremental = IncrementalSave(self._ranks.session, None, base.versions)
        self._incremental.set_plan(plan, tensors.tensors, tensors.number)
        return _encode(_Unchanged(base.id, self._incremental.find_frozen_files(tensors.versions)))

    def is_committed(self, checkpoint_id: str) -> bool:
        """See :class:`RunOutput`."""
        entry = find_tag(self._run, self._new.tag)
        return entry is not None and entry.names_checkpoint(checkpoint_id)

    def begin(self, saved: KnownCheckpoint, posted: Sequence[bytes], records: Records = NO_RECORDS) -> bytes:
        """See :class:`RunOutput`. Each attempt has a folder of its own: no two processes write one object."""
        del records  # only files that this process has uploaded are copied
        self._saved = saved
        self._checks().before()
        folder_id = saved.id if self._ranks.attempt == 0 else secrets.token_hex(8)
        upload, unchanged = self._open_parts(folder_id).upload, self._choose_unchanged(saved, posted)
        uploads = [] if unchanged else upload.begin(self._plan, saved.id)
        return _encode(_BegunUpload(folder_id, uploads, unchanged))

    def _choose_unchanged(self, saved: KnownCheckpoint, posted: Sequence[bytes]) -> list[int]:
        """Return the files that may be unchanged, on rank 0: no rank has seen a change, and the base has them."""
        base = self._base
        if base is None or self._incremental is None or self._known.makes_copies is False or not all(posted):
            return []
        ranks = [msgspec.msgpack.decode(raw, type=_Unchanged) for raw in posted]
        self._sharing_saves = count_sharing_saves(base, self._new.keep_full_every, saved.sequence)
        if {rank.base for rank in ranks} != {base.id} or not self._sharing_saves:
            return []
        from rankless.save.copied_files import CopiedFiles, can_be_copied  # noqa: PLC0415 - as above

        files, chosen = self._plan.files, set.intersection(*({*rank.files} for rank in ranks))
        numbers = [number for number in sorted(chosen) if can_be_copied(base, files[number])]
        publication = self._require_parts().publication
        copies = CopiedFiles(base, publication.folder, self._plan, numbers, note_of(saved.id), self._known)
        self._copies = self._incremental.files = copies
        return numbers

    def _checks(self) -> PublicationChecks:
        tier, tag = self._new.tier, self._new.tag
        if tier is None:
            return UNCHECKED
        return PublicationChecks(
            lambda: tier.check_not_fenced(tag), lambda finished: tier.check_not_superseded(finished, tag)
        )

    def _open_parts(self, folder_id: str) -> _OpenUpload:
        publication = ObjectPublication(self._run, self._new.tag, folder_id, self._checks())
        self._parts = _OpenUpload(ObjectUpload(publication.folder, self._ranks), publication)
        return self._parts

    def join(self, begun: bytes) -> None:
        """See :class:`RunOutput`."""
        self._begun = decoded = msgspec.msgpack.decode(begun, type=_BegunUpload)
        parts = self._parts or self._open_parts(decoded.folder_id)
        if not decoded.unchanged:
            parts.upload.join(self._plan, decoded.uploads)

    def omit_unchanged(self, *, trusts_versions: bool) -> SavePlan:
        """See :class:`RunOutput`. The uploads begin now if some files may have been unchanged."""
        if self._incremental is not None and self._begun.unchanged:
            self._share_unchanged(self._incremental, self._versions if trusts_versions else {})
        return self._plan

    def _share_unchanged(self, incremental: IncrementalSave, trusted: TensorVersions) -> None:
        """Find out which files the store copies, in a vote, and begin the uploads of all others."""
        from rankless.save.copied_files import BegunCopies  # noqa: PLC0415 - as above

        self._plan = incremental.omit_unchanged(self._begun.unchanged, (), trusted)
        self.shared_nbytes = incremental.shared_nbytes
        begun = msgspec.msgpack.decode(incremental.begun, type=BegunCopies)
        upload = self._require_parts().upload
        upload.join(self._plan, begun.uploads, begun.copied)
        if self._copies is not None:
            upload.share(self._copies, incremental.unchanged)

    def verify_trusted(self) -> None:
        """See :class:`RunOutput`."""
        if self._incremental is not None:
            self._incremental.verify_trusted()

    def _require_parts(self) -> _OpenUpload:
        if self._parts is None:
            raise StateError("nothing was begun to be uploaded: this is a bug of rankless")
        return self._parts

    def write(self, content: SavedContent, on_moved: OnBytesMoved) -> CheckpointInfo:
        """See :class:`RunOutput`."""

        def make_manifest(files: dict[str, FileRecord]) -> Manifest:
            content.begin_commit()
            self._copy_unchanged()
            return content.make_manifest(files)

        upload, publication = self._require_parts()
        upload.send_parts(content.move_share, content.build_small_files, on_moved)
        written = upload.finish(make_manifest, self._publish)
        if self._known.uploaded is self._base:
            files = upload.describe_files() if self._ranks.session.rank == COORDINATOR_RANK else {}
            saves = self._sharing_saves if self.shared_nbytes else 0
            self._known.uploaded = UploadedBase(
                publication.folder, written.id, written.sequence, files, self._versions, saves
            )
        return CheckpointInfo.of(publication.folder, written, self._new.tag)

    def _copy_unchanged(self) -> None:
        """Let the store copy the unchanged files, on rank 0, when all others are complete."""
        if self._copies is None:
            return
        try:
            self._copies.copy_all()
        except StorageError as error:
            if error.errno == errno.ENOENT:  # retention of another job may have removed them
                self._check_not_superseded()
            raise

    def _publish(self, finished: Manifest) -> Manifest:
        """Publish the checkpoint, on rank 0."""
        publication, new = self._require_parts().publication, self._new
        if not self._known.has_checked_store:
            self._check_store(publication.folder / manifest.NAME, manifest.encode_manifest(finished))
        is_corrupt = find_corrupt(new.corrupt, new.run, new.tag) is not None
        try:
            return publication.publish(finished, overwrite=new.overwrite or is_corrupt, is_corrupt=is_corrupt)
        except StorageError as error:
            if error.errno in {errno.ENOENT, errno.EIO}:  # not if the server cannot be reached
                self._check_not_superseded()
            raise

    def _check_not_superseded(self) -> None:
        """Raise ``SupersededError`` on rank 0 if another job has continued the run, and so may have removed the files.

        This job was stopped for long then. If the history cannot be read, nothing is raised.
        """
        if self._new.job is None or self._saved is None:
            return
        job = msgspec.structs.replace(self._new.job, claim=Claim(self._saved.run, self._saved.incarnation))
        with suppress(StorageError):
            check_not_superseded(self._run, read_history(self._run), job)

    def _check_store(self, written: ObjectPath, data: bytes) -> None:
        """Warn if the store writes an object that exists, although the request forbids it."""
        self._known.has_checked_store = True
        # Also a request that is sent again, because its first answer was lost, reports a success. That does not happen
        # twice.
        if all(self._run.store.create_object(written, data) for _ in range(2)):
            warn_caller(
                f"the store of {self._run} ignores the condition that an object must not exist. If two jobs save the "
                "same tag at the same time, one of both checkpoints is hidden: let one job at a time save into a run"
            )

    def remove_old(self) -> None:
        """See :class:`RunOutput`."""
        new = self._new
        if self._saved is not None and (new.keep is not None or new.overwrite or new.corrupt):
            self._require_parts().publication.remove_old_checkpoints(self._saved, new.keep, new.corrupt)

    def discard(self) -> None:
        """See :class:`RunOutput`."""
        self._known.uploaded = None  # the next save writes everything
        if self._ranks.session.rank == COORDINATOR_RANK and self._parts is not None:
            self._parts.publication.discard()
