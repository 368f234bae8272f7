"""A save of a training state into an object store: uploads by all ranks, and a pointer that makes the result visible.

Nothing is replaced and nothing is renamed: see :mod:`holdfast.run.object_run`. If the save dies at any moment, readers
still see the checkpoint before. What it has uploaded stays below a name of its own, until it is cleaned up.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from holdfast.engine.comm.session import RankGroup
from holdfast.engine.comm.store_messages import StoreMessages
from holdfast.engine.comm.vote import COORDINATOR_RANK
from holdfast.engine.integrity import replicas
from holdfast.engine.integrity.crc_gather import HashedResult, vote_with_fragments
from holdfast.engine.io import upload_parts
from holdfast.engine.io.checkpoint_files import build_headers, build_indexes
from holdfast.engine.io.p2p import P2PExchange
from holdfast.engine.io.requests import Fragments
from holdfast.engine.io.staging_memory import Arena, StagingMemory
from holdfast.engine.io.upload_parts import PartUploader, SentPart, UploadedParts, UploadTarget
from holdfast.engine.plan.save_plan import plan_save
from holdfast.errors import HoldfastError, StorageError, TagExistsError
from holdfast.observe.warning import warn_caller
from holdfast.ondisk import block_crcs, manifest
from holdfast.ondisk.files import parse_size
from holdfast.ondisk.manifest import FileRecord, Manifest
from holdfast.run.catalog import CheckpointIdentity, next_identity
from holdfast.run.cleanup import delete_checkpoints, expired_checkpoints
from holdfast.run.object_removal import delete_checkpoint_objects, discard_folder, is_intact
from holdfast.run.object_run import checkpoint_folder
from holdfast.run.pointers import Pointer, TagEntry, find_highest_number, find_tag, is_pointer, pointer_path
from holdfast.run.scan import CheckpointInfo
from holdfast.save.negotiation import SaveAgreement, negotiate_save
from holdfast.save.request import SaveRequest
from holdfast.save.training_save import SavePlanCache, TrainingSave
from holdfast.storage.object_path import ObjectPath
from holdfast.storage.store import Upload, map_requests

#: How often a save tries to publish its checkpoint, and the seconds between.
_PUBLISH_ATTEMPTS, _PUBLISH_SECONDS = 100, 0.1

_encode = msgspec.msgpack.Encoder().encode


class _BegunSave(msgspec.Struct, frozen=True, array_like=True):
    """The decision of rank 0: the identity of the checkpoint, and the id of the upload of each file; empty without one.

    ``identity`` is ``None`` if replicas differ.
    """

    identity: CheckpointIdentity | None = None
    uploads: list[str] = []


class _Report(msgspec.Struct, frozen=True, array_like=True):
    """The report of a rank that has uploaded its parts: its values, and the parts."""

    rank_values: bytes
    sent: list[SentPart]


class ObjectSave(TrainingSave):
    """A save of a training state as one checkpoint of a run in an object store."""

    def __init__(
        self, request: SaveRequest, run: ObjectPath, ranks: RankGroup, cache: SavePlanCache, timeout: float
    ) -> None:
        super().__init__(request, ranks, cache, timeout)
        self._run = run
        self._targets: Sequence[UploadTarget] = ()
        #: On rank 0, the parts that all ranks have sent, the records of the files, and the files without tensor data.
        self._sent: list[SentPart] = []
        self._records: list[FileRecord] = []
        self._small_files: dict[str, bytes] = {}
        #: On rank 0, the pointer that this save has replaced, and whether the pointer of this save may exist.
        self._replaced: TagEntry | None = None
        self._may_be_published = False

    @property
    def _folder(self) -> ObjectPath:
        return checkpoint_folder(self._run, self._request.tag, self._identity.id)

    def prepare_save(self) -> None:
        """Capture the training state, plan the save, and begin the uploads."""
        agreement = negotiate_save(self._request, self._session, self._ranks.global_ranks(), self._cache.key)
        self._captured, self._merged_values = agreement.captured, agreement.merged_values
        uploads = self._plan_and_begin(agreement)
        self._removes_old = self._request.keep is not None or self._request.overwrite
        self._targets = self._make_targets(uploads)

    def _plan_and_begin(self, agreement: SaveAgreement) -> Sequence[str]:
        """Plan, check that replicas are equal, and begin the uploads on rank 0. Return their ids."""
        cache, request, session = self._cache, self._request, self._session

        def plan_and_compare() -> bytes:
            if agreement.global_spec is not None:
                cache.key = b""
                limit = parse_size(request.max_shard_size)
                # Each rank is a host of its own: a part has one sender.
                cache.plan = plan_save(
                    agreement.global_spec, session.rank, limit, range(session.size), upload_parts.GRAIN
                )
                cache.key, cache.saves = agreement.key, 0
            self._plan = cache.plan
            return self._hash_replicas()

        def begin_uploads(posted: list[bytes]) -> bytes:
            if not replicas.have_equal_replicas(posted):
                return _encode(_BegunSave())
            self._identity = next_identity(request.path, request.runs)
            self._started_at = round(time.time(), 6)
            return _encode(_BegunSave(self._identity, self._create_uploads()))

        _, raw = session.vote("preparing the save", plan_and_compare, lambda digests: digests, begin_uploads)
        begun = msgspec.msgpack.decode(raw, type=_BegunSave)
        if begun.identity is None:
            cache.key = b""
            raise self._writer.describe_replica_mismatch()
        cache.saves += 1
        self._identity = begun.identity
        return begun.uploads

    def _create_uploads(self) -> list[str]:
        """Begin the upload of each file that has several parts, and return the ids."""
        store, notes = self._run.store, {"holdfast": self._identity.id}

        def create_upload(number: int) -> str:
            file = self._plan.files[number]
            upload_parts.check_file_size(file.path, file.size)
            return (
                store.create_upload(self._folder / file.path, notes).id if file.size > upload_parts.PART_BYTES else ""
            )

        return map_requests(create_upload, range(len(self._plan.files)))

    def _make_targets(self, uploads: Sequence[str]) -> Sequence[UploadTarget]:
        paths = [self._folder / file.path for file in self._plan.files]
        return [
            UploadTarget(path, file.size, Upload(path, upload) if upload else None)
            for path, file, upload in zip(paths, self._plan.files, uploads, strict=True)
        ]

    def write_and_commit(self) -> CheckpointInfo:
        """Upload the files, publish the checkpoint, and remove the checkpoints that are no longer kept."""
        headers, uploaded = self._upload_files()
        committed = self._send_headers_and_publish(headers, uploaded)
        self._release_tensors()
        info = CheckpointInfo.of(self._folder, committed, self._request.tag)
        self._reporter.report_saved(self.path, info.step, info.nbytes, 0)
        if self._removes_old:
            self._session.run_on_all("removing old checkpoints", self._remove_old_checkpoints)
        return info

    def _upload_files(self) -> tuple[list[bytes], UploadedParts]:
        """Upload all parts without headers. Return the headers of all files, and what this rank has uploaded."""
        uploaded = UploadedParts()

        def upload_share() -> HashedResult:
            nonlocal uploaded
            uploaded = self._upload_share()
            return HashedResult(uploaded.fragments, _encode(_Report(self._captured.rank_values, uploaded.sent)))

        def fold(fragments: Fragments, payloads: list[bytes]) -> bytes:
            reports = [msgspec.msgpack.decode(payload, type=_Report) for payload in payloads]
            self._sent = [part for report in reports for part in report.sent]
            finished = list(build_headers(self._plan, fragments))
            self._records = [record for _, record in finished]
            self._small_files = {
                **build_indexes(self._plan),
                **self._build_small_files([report.rank_values for report in reports]),
            }
            return _encode([header for header, _ in finished])

        decision = vote_with_fragments(self._session, "writing", upload_share, fold, self._plan.rank_order)
        return msgspec.msgpack.decode(decision, type=list[bytes]), uploaded

    def _upload_share(self) -> UploadedParts:
        session, writer = self._session, self._writer
        staged = self._staged
        if staged is None and self._plan.stripe_tasks:  # stripes are assembled in memory first
            staged = writer.stage(Arena(StagingMemory()), self._deferred_copies())
        elif staged is None:
            writer.synchronize()
        file_ranges, shard_of = writer.ranges_in_memory(staged)
        uploader = PartUploader(self._plan, self._targets, session.rank, file_ranges, shard_of)
        on_moved = self._reporter.progress_counter("save", self._plan.nbytes).add
        messages = StoreMessages(session)
        if not self._plan.needs_exchange:
            return uploader.upload(None, messages, session.size, on_moved)
        with P2PExchange(self._ranks.gloo_group(session.timeout), session) as p2p:
            return uploader.upload(p2p, messages, session.size, on_moved)

    def _send_headers_and_publish(self, headers: list[bytes], uploaded: UploadedParts) -> Manifest:
        """Send the parts with headers. Then rank 0 completes all files, and publishes the checkpoint."""

        def send_headers() -> list[SentPart]:
            return uploaded.send_held(self._targets, headers)

        def publish(posted: list[bytes]) -> bytes:
            last = [part for raw in posted for part in msgspec.msgpack.decode(raw, type=list[SentPart])]
            self._complete_uploads([*self._sent, *last])
            return manifest.encode_manifest(self._publish(self._write_small_files()))

        _, decision = self._session.vote("completing the files", send_headers, _encode, publish)
        return manifest.decode_manifest(decision, manifest.NAME)

    def _complete_uploads(self, parts: Sequence[SentPart]) -> None:
        receipts: dict[int, dict[int, str]] = {}
        for file, part, receipt in parts:
            receipts.setdefault(file, {})[part] = receipt

        def complete(number: int) -> None:
            target, crc = self._targets[number], int(self._records[number].crc64nvme, 16)
            of_file = receipts.get(number, {})
            if sorted(of_file) != list(range(-(-target.size // upload_parts.PART_BYTES))):
                raise StorageError(errno.EIO, f"not all parts of {target.path} were sent: this is a bug of holdfast")
            if target.upload is not None:
                ordered = [of_file[part] for part in sorted(of_file)]
                target.path.store.complete_upload(target.upload, ordered, target.size, crc)

        map_requests(complete, range(len(self._targets)))

    def _write_small_files(self) -> Manifest:
        """Write the files without tensor data, the manifest last, and return it."""
        store, folder = self._run.store, self._folder
        map_requests(
            lambda name: store.replace_small(folder / name, self._small_files[name]), sorted(self._small_files)
        )
        records = {file.path: record for file, record in zip(self._plan.files, self._records, strict=True)}
        for name, data in self._small_files.items():
            records[name] = FileRecord(len(data), f"{block_crcs.crc64(data):016x}")
        finished = self._build_manifest(dict(sorted(records.items())))
        data = manifest.encode_manifest(finished)
        store.replace_small(folder / manifest.NAME, data)
        if not self._cache.has_checked_store:
            self._check_store(folder / manifest.NAME, data)
        return finished

    def _check_store(self, written: ObjectPath, data: bytes) -> None:
        """Warn if the store writes an object that exists, although the request forbids it."""
        self._cache.has_checked_store = True
        # Also a request whose first answer was lost reports a success. That does not happen twice.
        if all(self._run.store.create_object(written, data) for _ in range(2)):
            warn_caller(
                f"the store of {self._run} ignores the condition that an object must not exist. If two jobs save the "
                "same tag at the same time, one of both checkpoints is hidden: let one job at a time save into a run"
            )

    def _publish(self, finished: Manifest) -> Manifest:
        """Create the pointer. Raises ``TagExistsError`` if another job has taken the tag."""
        pointer = Pointer.of(finished)
        data = msgspec.json.encode(pointer)
        for _ in range(_PUBLISH_ATTEMPTS):
            entry = find_tag(self._run, self._request.tag)
            if entry is not None and entry.names_checkpoint(pointer.id):  # by an attempt that seemed to fail
                self._may_be_published = True
                self._check_intact(entry.path, finished)
                return finished
            if entry is not None:
                self._check_replaceable(entry, pointer)
            self._replaced = entry
            if self._create_pointer(1 if entry is None else entry.number + 1, data, finished):
                return finished
            time.sleep(_PUBLISH_SECONDS)
        raise StorageError(errno.EBUSY, f"could not publish {self._folder}: other processes take its tag all the time")

    def _create_pointer(self, number: int, data: bytes, finished: Manifest) -> bool:
        """Create a pointer. Return whether it counts: whether no other process has created it, or a higher one."""
        tag, store = self._request.tag, self._run.store
        path = pointer_path(self._run, tag, number)
        self._may_be_published = True
        # A store whose conditions are not atomic, or which ignores them, may let two writers create one object.
        if not store.create_object(path, data):
            self._may_be_published = False
            return False
        if (stored := store.read_small(path)) != data:
            self._may_be_published = not is_pointer(stored)  # what is no pointer may be the answer of a proxy
            return False
        if find_highest_number(self._run, tag) > number:  # another process has removed the lower ones meanwhile
            store.remove_file(path)
            self._may_be_published = False
            return False
        self._check_intact(path, finished)
        return True

    def _check_intact(self, pointer: ObjectPath, finished: Manifest) -> None:
        """Withdraw the pointer if another process has begun to delete the files, because this one seemed to be dead."""
        sizes = {name: record.size for name, record in finished.files.items()}
        sizes[manifest.NAME] = len(manifest.encode_manifest(finished))
        if not is_intact(self._folder, sizes):
            self._run.store.remove_file(pointer)
            raise StorageError(
                errno.ENOENT,
                f"files of {self._folder} were removed or changed while they were being saved: save again, and let "
                "clean-ups remove only what is a day old",
            )

    def _check_replaceable(self, entry: TagEntry, pointer: Pointer) -> None:
        if not self._request.overwrite:
            raise TagExistsError(f"{self.path} appeared while this checkpoint was being saved; it was left as it is")
        if isinstance(entry.pointer, Pointer) and entry.pointer.age > pointer.age:
            raise TagExistsError(f"another job has saved {self.path} meanwhile; it is newer, and left as it is")

    def _remove_old_checkpoints(self) -> None:
        """Remove the replaced checkpoint and those that are not kept. Failures only warn: the new one is committed."""
        if self._session.rank != COORDINATOR_RANK:
            return
        try:
            if self._replaced is not None:
                delete_checkpoint_objects(self._run, self._replaced)
            if self._request.keep is not None:
                list(delete_checkpoints(expired_checkpoints(self._run, self._identity.run, self._request.keep)))
        except Exception as error:  # noqa: BLE001 - the checkpoint is committed, whatever a policy or the store raises
            warn_caller(f"the checkpoint is saved, but an old one could not be removed: {error}")

    def _roll_back(self, error: BaseException) -> None:
        """Delete what was uploaded, unless it is published, or that is unknown."""
        if self._session.rank == COORDINATOR_RANK and self._identity.id:
            # If it is unknown whether the pointer exists, or a request for it may still arrive, a clean-up decides.
            with suppress(HoldfastError):
                if not self._may_be_published:
                    discard_folder(self._folder)
        self._reporter.report_failed(error)
