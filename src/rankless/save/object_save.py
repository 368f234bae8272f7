"""A save of a training state into an object store: uploads by all ranks, and a pointer that makes the result visible.

Nothing is replaced and nothing is renamed: see :mod:`rankless.run.object_run`. If the save dies at any moment, readers
still see the checkpoint before. What it has uploaded stays below a name of its own, until it is cleaned up.
"""

from __future__ import annotations

import errno
import time
from contextlib import suppress
from typing import NamedTuple

import msgspec

from rankless.engine.comm.session import RankGroup
from rankless.engine.comm.vote import COORDINATOR_RANK
from rankless.engine.integrity import replica_comparison
from rankless.engine.io import upload_parts
from rankless.engine.plan.save_plan import plan_save
from rankless.errors import StateError, StorageError
from rankless.observe.warning import warn_caller
from rankless.ondisk import manifest
from rankless.ondisk.data_files import parse_size
from rankless.ondisk.manifest import FileRecord, Manifest
from rankless.process.prepared_types import prepared
from rankless.run.catalog import CheckpointIdentity
from rankless.run.claims import Claim, check_not_superseded, read_history
from rankless.run.scan import CheckpointInfo
from rankless.save.object_publication import UNCHECKED, ObjectPublication, PublicationChecks
from rankless.save.object_upload import ObjectUpload
from rankless.save.save_negotiation import SaveAgreement
from rankless.save.save_request import SaveRequest
from rankless.save.shared_upload import RankBytes, UploadRanks
from rankless.save.training_save import SavePlanCache, TrainingSave
from rankless.storage.object_path import ObjectPath

_encode = msgspec.msgpack.Encoder().encode


@prepared
class _BegunSave(msgspec.Struct, frozen=True, array_like=True):
    """The decision of rank 0: the identity of the checkpoint, and the id of the upload of each file; empty without one.

    ``identity`` is ``None`` if replicas differ.
    """

    identity: CheckpointIdentity | None = None
    uploads: list[str] = []


class _Output(NamedTuple):
    """The upload of the files, and the publication of their folder."""

    upload: ObjectUpload
    publication: ObjectPublication


class ObjectSave(TrainingSave):
    """A save of a training state as one checkpoint of a run in an object store."""

    def __init__(
        self, request: SaveRequest, run: ObjectPath, ranks: RankGroup, cache: SavePlanCache, timeout: float
    ) -> None:
        super().__init__(request, ranks, cache, timeout)
        self._run = run
        self._output: _Output | None = None

    def _plan_and_open(self, agreement: SaveAgreement) -> None:
        """Plan, check that replicas are equal, and begin the uploads on rank 0."""
        cache, session = self._cache, self._session

        def plan_and_compare() -> bytes:
            self._update_plan(agreement)
            return self._hash_replicas()

        def begin_uploads(posted: list[bytes]) -> bytes:
            if not replica_comparison.have_equal_replicas(posted):
                return _encode(_BegunSave())
            identity = self._choose_identity()
            self._set_identity(identity)
            self._started_at = round(time.time(), 6)
            return _encode(_BegunSave(identity, self._open_output(identity.id).upload.begin(identity.id)))

        _, raw = session.vote("preparing the save", plan_and_compare, lambda digests: digests, begin_uploads)
        begun = msgspec.msgpack.decode(raw, type=_BegunSave)
        if begun.identity is None:
            cache.key = b""
            raise self._writer.describe_replica_mismatch()
        cache.saves += 1
        self._set_identity(begun.identity)
        self._join_output(begun.identity.id, begun.uploads)
        self._removes_old = self._request.keep is not None or self._request.overwrite or bool(self._request.corrupt)

    def _update_plan(self, agreement: SaveAgreement) -> None:
        """Plan the save, unless the plan of an earlier one is still right."""
        cache, session = self._cache, self._session
        if agreement.global_spec is not None:
            cache.key = b""
            limit = parse_size(self._request.options.max_shard_size)
            # Each rank is a host of its own: a part has one sender.
            cache.plan = plan_save(agreement.global_spec, session.rank, limit, range(session.size), upload_parts.GRAIN)
            cache.key, cache.saves = agreement.key, 0
        self._plan = cache.plan

    def _open_output(self, folder_id: str, attempt: int = 0, checks: PublicationChecks = UNCHECKED) -> _Output:
        """Make an upload into a folder with an id, and its publication. Nothing is sent."""
        publication = ObjectPublication(self._run, self._request.tag, folder_id, checks)
        ranks = UploadRanks(self._ranks, self._session, attempt)
        self._output = _Output(ObjectUpload(publication.folder, self._plan, ranks), publication)
        return self._output

    def _join_output(self, folder_id: str, uploads: list[str], attempt: int = 0) -> None:
        """Take part in the uploads that rank 0 has begun."""
        is_open = self._session.rank == COORDINATOR_RANK
        output = self._require_output() if is_open else self._open_output(folder_id, attempt)
        output.upload.join(uploads)

    def _require_output(self) -> _Output:
        if self._output is None:
            raise StateError("nothing was begun to be uploaded: this is a bug of rankless")
        return self._output

    def write_and_commit(self) -> CheckpointInfo:
        """Upload the files, publish the checkpoint, and remove the checkpoints that are no longer kept."""
        self._reporter.begin_phase("write")
        upload, publication = self._require_output()
        on_moved = self._reporter.progress_counter("save", self._plan.nbytes).add
        upload.send_parts(self._read_bytes, self._build_small_files, on_moved)
        committed = upload.finish(self._make_manifest, self._publish)
        self._release_tensors()
        info = CheckpointInfo.of(publication.folder, committed, self._request.tag)
        self._reporter.report_saved(self.path, info.step, info.nbytes, 0)
        if self._removes_old:
            self._session.run_on_all("removing old checkpoints", self._remove_old_checkpoints)
        return info

    def _make_manifest(self, files: dict[str, FileRecord]) -> Manifest:
        """Return the manifest, on rank 0. All files are complete, so the commit begins."""
        self._reporter.begin_phase("commit")
        return self._build_manifest(files)

    def _read_bytes(self) -> RankBytes:
        """Return the bytes that this rank uploads or passes on."""
        return RankBytes(*self._writer.ranges_to_upload(self._staged), self._captured.rank_values)

    def _publish(self, finished: Manifest) -> Manifest:
        """Publish the checkpoint, on rank 0."""
        publication = self._require_output().publication
        if not self._cache.has_checked_store:
            self._check_store(publication.folder / manifest.NAME, manifest.encode_manifest(finished))
        request = self._request
        is_corrupt = request.find_corrupt() is not None
        try:
            return publication.publish(finished, overwrite=request.overwrite or is_corrupt, is_corrupt=is_corrupt)
        except StorageError as error:
            if error.errno in {errno.ENOENT, errno.EIO}:  # not if the server cannot be reached
                self._check_not_superseded()
            raise

    def _check_not_superseded(self) -> None:
        """Raise ``SupersededError`` on rank 0 if another job has continued the run, and so may have removed the files.

        This job was stopped for long then. If the history cannot be read, nothing is raised.
        """
        claimed = Claim(self._identity.run, self._identity.incarnation)
        job = msgspec.structs.replace(self._request.job, claim=claimed)
        with suppress(StorageError):
            check_not_superseded(self._run, read_history(self._run), job)

    def _check_store(self, written: ObjectPath, data: bytes) -> None:
        """Warn if the store writes an object that exists, although the request forbids it."""
        self._cache.has_checked_store = True
        # Also a request whose first answer was lost reports a success. That does not happen twice.
        if all(self._run.store.create_object(written, data) for _ in range(2)):
            warn_caller(
                f"the store of {self._run} ignores the condition that an object must not exist. If two jobs save the "
                "same tag at the same time, one of both checkpoints is hidden: let one job at a time save into a run"
            )

    def _remove_old_checkpoints(self) -> None:
        if self._session.rank == COORDINATOR_RANK:
            request, publication = self._request, self._require_output().publication
            publication.remove_old_checkpoints(self._identity, request.keep, request.corrupt)

    def _discard_output(self) -> None:
        """Delete what was uploaded, on rank 0, unless it is published, or that is unknown."""
        if self._session.rank == COORDINATOR_RANK and self._output is not None:
            self._output.publication.discard()

    def _roll_back(self, error: BaseException) -> None:
        self._discard_output()
        self._reporter.report_failed(error)
