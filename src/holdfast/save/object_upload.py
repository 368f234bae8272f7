"""One attempt to upload the files of a checkpoint below a folder of its own, by all ranks of a session.

It takes two votes. In the first all ranks send the parts without headers, and rank 0 builds the headers. In the second
the ranks send the parts with headers; then rank 0 completes all files, the manifest last, and publishes the checkpoint.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from holdfast.engine.comm.session import RankGroup, Session
from holdfast.engine.comm.store_messages import StoreMessages
from holdfast.engine.integrity.crc_gather import HashedResult, vote_with_fragments
from holdfast.engine.io import upload_parts
from holdfast.engine.io.checkpoint_files import MakeManifest, build_headers, build_indexes
from holdfast.engine.io.p2p import P2PExchange
from holdfast.engine.io.requests import Fragments, MemoryOf, OnBytesMoved
from holdfast.engine.io.upload_parts import PartUploader, SentPart, UploadedParts, UploadTarget
from holdfast.engine.plan.file_ranges import FileRange
from holdfast.engine.plan.save_plan import SavePlan
from holdfast.errors import StorageError
from holdfast.ondisk import block_crcs, manifest
from holdfast.ondisk.manifest import FileRecord, Manifest
from holdfast.storage.object_path import ObjectPath
from holdfast.storage.store import Upload, map_requests

#: The messages of two attempts in one session do not mix: each has so many rounds.
_ROUNDS = 2**32

_encode = msgspec.msgpack.Encoder().encode


class _Report(msgspec.Struct, frozen=True, array_like=True):
    """The report of a rank that has uploaded its parts: its values, and the parts."""

    rank_values: bytes
    sent: list[SentPart]


@dataclass(frozen=True)
class RankBytes:
    """The bytes that a rank has: ranges of files, the sources of their bytes by tensor, and its values."""

    file_ranges: Sequence[FileRange]
    bytes_of: MemoryOf
    rank_values: bytes


@dataclass(frozen=True)
class UploadRanks:
    """The ranks that upload together. ``attempt`` counts the attempts in their session, from 0 on."""

    group: RankGroup
    session: Session
    attempt: int = 0


class ObjectUpload:
    """One attempt to upload a checkpoint into ``folder``."""

    def __init__(self, folder: ObjectPath, plan: SavePlan, ranks: UploadRanks) -> None:
        self.folder, self._plan, self._ranks = folder, plan, ranks
        self._targets: Sequence[UploadTarget] = ()
        self._uploaded, self._headers = UploadedParts(), list[bytes]()
        #: On rank 0, the parts that all ranks have sent, the records of the files, and the files without tensor data.
        self._sent: list[SentPart] = []
        self._records: list[FileRecord] = []
        self._small_files: Mapping[str, bytes] = {}

    def begin(self, checkpoint_id: str) -> list[str]:
        """Begin the upload of each file that has several parts, on rank 0, and return their ids; empty without one."""
        store, notes = self.folder.store, {"holdfast": checkpoint_id}

        def create_upload(number: int) -> str:
            file = self._plan.files[number]
            upload_parts.check_file_size(file.path, file.size)
            return store.create_upload(self.folder / file.path, notes).id if file.size > upload_parts.PART_BYTES else ""

        return map_requests(create_upload, range(len(self._plan.files)))

    def join(self, uploads: Sequence[str]) -> None:
        """Take part in the uploads with these ids."""
        paths = [self.folder / file.path for file in self._plan.files]
        self._targets = [
            UploadTarget(path, file.size, Upload(path, upload) if upload else None)
            for path, file, upload in zip(paths, self._plan.files, uploads, strict=True)
        ]

    def send_parts(
        self,
        read_bytes: Callable[[], RankBytes],
        build_small_files: Callable[[Sequence[bytes]], Mapping[str, bytes]],
        on_moved: OnBytesMoved,
    ) -> None:
        """Send all parts without headers. ``build_small_files`` is called on rank 0 with the values of all ranks."""

        def upload_share() -> HashedResult:
            own = read_bytes()
            self._uploaded = self._upload_share(own, on_moved)
            return HashedResult(self._uploaded.fragments, _encode(_Report(own.rank_values, self._uploaded.sent)))

        def fold(fragments: Fragments, payloads: list[bytes]) -> bytes:
            reports = [msgspec.msgpack.decode(payload, type=_Report) for payload in payloads]
            self._sent = [part for report in reports for part in report.sent]
            finished = list(build_headers(self._plan, fragments))
            self._records = [record for _, record in finished]
            own_files = build_small_files([report.rank_values for report in reports])
            self._small_files = {**build_indexes(self._plan), **own_files}
            return _encode([header for header, _ in finished])

        decision = vote_with_fragments(self._ranks.session, "writing", upload_share, fold, self._plan.rank_order)
        self._headers = msgspec.msgpack.decode(decision, type=list[bytes])

    def _upload_share(self, own: RankBytes, on_moved: OnBytesMoved) -> UploadedParts:
        session, attempt = self._ranks.session, self._ranks.attempt
        uploader = PartUploader(self._plan, self._targets, session.rank, own.file_ranges, own.bytes_of)
        messages = StoreMessages(session, attempt * _ROUNDS)
        if not self._plan.needs_exchange:
            return uploader.upload(None, messages, session.size, on_moved)
        with P2PExchange(self._ranks.group.gloo_group(session.timeout), session, attempt) as p2p:
            return uploader.upload(p2p, messages, session.size, on_moved)

    def finish(self, make_manifest: MakeManifest, publish: Callable[[Manifest], Manifest]) -> Manifest:
        """Send the parts with headers. Then rank 0 completes all files, and publishes the checkpoint.

        ``publish`` is called on rank 0 with the manifest when that is written. Return what it returns.
        """

        def send_headers() -> list[SentPart]:
            return self._uploaded.send_held(self._targets, self._headers)

        def complete(posted: list[bytes]) -> bytes:
            last = [part for raw in posted for part in msgspec.msgpack.decode(raw, type=list[SentPart])]
            self._complete_uploads([*self._sent, *last])
            return manifest.encode_manifest(publish(self._write_small_files(make_manifest)))

        _, decision = self._ranks.session.vote("completing the files", send_headers, _encode, complete)
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

    def _write_small_files(self, make_manifest: MakeManifest) -> Manifest:
        """Write the files without tensor data, the manifest last, and return it."""
        store, small_files = self.folder.store, self._small_files
        map_requests(lambda name: store.replace_small(self.folder / name, small_files[name]), sorted(small_files))
        records = {file.path: record for file, record in zip(self._plan.files, self._records, strict=True)}
        for name, data in small_files.items():
            records[name] = FileRecord(len(data), f"{block_crcs.crc64(data):016x}")
        finished = make_manifest(dict(sorted(records.items())))
        store.replace_small(self.folder / manifest.NAME, manifest.encode_manifest(finished))
        return finished
