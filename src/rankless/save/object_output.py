"""An attempt to write a checkpoint into a run in an object store: uploads by all ranks, and a pointer to the result.

Nothing is replaced and nothing is renamed: see :mod:`rankless.run.object_run`. If the save dies at any moment, readers
still see the checkpoint before. What it has uploaded stays below a name of its own, until it is cleaned up.
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from rankless.engine.comm.vote import COORDINATOR_RANK
from rankless.engine.io import upload_parts
from rankless.engine.io.requests import OnBytesMoved
from rankless.engine.plan.save_plan import EMPTY_PLAN, SavePlan
from rankless.engine.plan.writer_cells import CellGrain
from rankless.errors import StateError, StorageError
from rankless.observe.warning import warn_caller
from rankless.ondisk import manifest
from rankless.ondisk.manifest import FileRecord, Manifest
from rankless.process.prepared_types import prepared
from rankless.run.claims import Claim, check_not_superseded, read_history
from rankless.run.corruption import find_corrupt
from rankless.run.history import KnownCheckpoint
from rankless.run.pointers import find_tag
from rankless.run.scan import CheckpointInfo
from rankless.save.base_checkpoint import KnownRun
from rankless.save.object_publication import UNCHECKED, ObjectPublication, PublicationChecks
from rankless.save.object_upload import ObjectUpload
from rankless.save.run_output import LiveTensors, NewTag, SavedContent, WritingRanks
from rankless.storage.object_path import ObjectPath


@prepared
class _BegunUpload(msgspec.Struct, frozen=True, array_like=True):
    """The result of rank 0: the id in the name of the folder, and the id of each upload; empty without one."""

    folder_id: str
    uploads: list[str]


class _OpenUpload(NamedTuple):
    """The upload of the files, and the publication of their folder."""

    upload: ObjectUpload
    publication: ObjectPublication


_encode = msgspec.msgpack.Encoder().encode


class RunObjectOutput:
    """A :class:`rankless.save.run_output.RunOutput` in an object store."""

    #: Objects cannot be linked.
    shared_nbytes = 0

    def __init__(self, new: NewTag, run: ObjectPath, ranks: WritingRanks, known: KnownRun) -> None:
        self._new, self._run, self._ranks, self._known = new, run, ranks, known
        self._plan = EMPTY_PLAN
        self._parts: _OpenUpload | None = None
        #: On rank 0, the checkpoint that is written.
        self._saved: KnownCheckpoint | None = None

    @property
    def grain(self) -> CellGrain:
        """See :class:`RunOutput`. Each part of an upload has one sender."""
        return upload_parts.GRAIN  # as it is at each save: tests upload small parts

    def prepare(self, plan: SavePlan, tensors: LiveTensors | None = None, witness: int | None = None) -> bytes:
        """See :class:`RunOutput`."""
        del tensors, witness
        self._plan = plan
        return b""

    def is_committed(self, checkpoint_id: str) -> bool:
        """See :class:`RunOutput`."""
        entry = find_tag(self._run, self._new.tag)
        return entry is not None and entry.names_checkpoint(checkpoint_id)

    def begin(self, saved: KnownCheckpoint, posted: Sequence[bytes]) -> bytes:
        """See :class:`RunOutput`. Each attempt has a folder of its own: no two processes write one object."""
        del posted
        self._saved = saved
        self._checks().before()
        folder_id = saved.id if self._ranks.attempt == 0 else secrets.token_hex(8)
        return _encode(_BegunUpload(folder_id, self._open_parts(folder_id).upload.begin(saved.id)))

    def _checks(self) -> PublicationChecks:
        tier, tag = self._new.tier, self._new.tag
        if tier is None:
            return UNCHECKED
        return PublicationChecks(
            lambda: tier.check_not_fenced(tag), lambda finished: tier.check_not_superseded(finished, tag)
        )

    def _open_parts(self, folder_id: str) -> _OpenUpload:
        publication = ObjectPublication(self._run, self._new.tag, folder_id, self._checks())
        self._parts = _OpenUpload(ObjectUpload(publication.folder, self._plan, self._ranks), publication)
        return self._parts

    def join(self, begun: bytes) -> None:
        """See :class:`RunOutput`."""
        decoded = msgspec.msgpack.decode(begun, type=_BegunUpload)
        parts = self._parts or self._open_parts(decoded.folder_id)
        parts.upload.join(decoded.uploads)

    def omit_unchanged(self, *, trusts_versions: bool) -> SavePlan:
        """See :class:`RunOutput`."""
        del trusts_versions
        return self._plan

    def verify_trusted(self) -> None:
        """See :class:`RunOutput`."""

    def _require_parts(self) -> _OpenUpload:
        if self._parts is None:
            raise StateError("nothing was begun to be uploaded: this is a bug of rankless")
        return self._parts

    def write(self, content: SavedContent, on_moved: OnBytesMoved) -> CheckpointInfo:
        """See :class:`RunOutput`."""

        def make_manifest(files: dict[str, FileRecord]) -> Manifest:
            content.begin_commit()
            return content.make_manifest(files)

        upload, publication = self._require_parts()
        upload.send_parts(content.read_bytes, content.build_small_files, on_moved)
        return CheckpointInfo.of(publication.folder, upload.finish(make_manifest, self._publish), self._new.tag)

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
        # Also a request whose first answer was lost reports a success. That does not happen twice.
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
        if self._ranks.session.rank == COORDINATOR_RANK and self._parts is not None:
            self._parts.publication.discard()
