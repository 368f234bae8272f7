"""One attempt to upload the files of a checkpoint below a folder of its own, by all ranks of a session.

When all data files are complete, rank 0 writes the small ones, the manifest last, and publishes the checkpoint.

:mod:`rankless.save.object_output` has one on every rank, and calls it in the thread of the save. No object may become a
checkpoint before the manifest is written, which must be last.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from rankless.engine.comm.session import WritingRanks
from rankless.engine.io.checkpoint_files import (
    NOTHING_UNCHANGED,
    MakeManifest,
    UnchangedBlocks,
    build_headers,
    build_indexes,
)
from rankless.engine.io.requests import KnownFragments, MoveRanges, OnBytesMoved
from rankless.engine.io.upload_target import FileFrame
from rankless.engine.plan.save_plan import EMPTY_PLAN, SavePlan
from rankless.errors import StateError
from rankless.ondisk import block_crcs, manifest
from rankless.ondisk.manifest import FileRecord, Manifest
from rankless.save.base_checkpoint import UploadedFile
from rankless.save.shared_upload import SharedUpload, begin_uploads
from rankless.storage.object_path import ObjectPath
from rankless.storage.store import map_requests

if TYPE_CHECKING:
    from rankless.save.copied_files import CopiedFiles


def note_of(checkpoint_id: str) -> Mapping[str, str]:
    """Return the metadata of each object of a checkpoint.

    Rank 0 passes it to each upload that it begins.
    """
    return {"rankless": checkpoint_id}


class ObjectUpload:
    """One attempt to upload a checkpoint into ``folder``."""

    def __init__(self, folder: ObjectPath, ranks: WritingRanks) -> None:
        self.folder, self._plan, self._ranks = folder, EMPTY_PLAN, ranks
        self._shared: SharedUpload | None = None
        #: On rank 0, the files that the store copies, if there are some.
        self._copies: CopiedFiles | None = None
        self._unchanged = NOTHING_UNCHANGED
        #: On rank 0, the headers and records of the files, and the files without tensor data.
        self._headers: list[tuple[bytes, FileRecord]] = []
        self._small_files: Mapping[str, bytes] = {}

    def begin(self, plan: SavePlan, checkpoint_id: str) -> list[str]:
        """Begin the upload of each file that has several parts, on rank 0, and return their ids; empty without one."""
        return begin_uploads({self.folder / file.path: file.size for file in plan.files}, note_of(checkpoint_id))

    def join(self, plan: SavePlan, uploads: Sequence[str], copied: Collection[int] = ()) -> None:
        """Take part in the uploads with these ids. The ``plan`` has no bytes of files that are ``copied``.

        All ranks call it before :meth:`send_parts`.
        """
        self._plan = plan
        files = {
            self.folder / file.path: FileFrame(0) if number in copied else FileFrame(file.size, file.data_start)
            for number, file in enumerate(plan.files)
        }
        self._shared = SharedUpload(plan, self._ranks, files, uploads)

    def share(self, copies: CopiedFiles, unchanged: UnchangedBlocks) -> None:
        """Note the files that the store copies, on rank 0, and their ``unchanged`` blocks."""
        self._copies, self._unchanged = copies, unchanged

    def _require_shared(self) -> SharedUpload:
        if self._shared is None:
            raise StateError("this rank takes part in no upload: this is a bug of rankless")
        return self._shared

    def send_parts(
        self,
        move_share: Callable[[MoveRanges], bytes],
        build_small_files: Callable[[Sequence[bytes]], Mapping[str, bytes]],
        on_moved: OnBytesMoved,
    ) -> None:
        """Send all parts without headers. ``build_small_files`` is called on rank 0 with the values of all ranks.

        All ranks call it. It holds the vote "writing".
        """

        def build_all(fragments: KnownFragments, rank_values: Sequence[bytes]) -> list[bytes]:
            self._headers = list(build_headers(self._plan, fragments, self._unchanged))
            self._small_files = {**build_indexes(self._plan), **build_small_files(rank_values)}
            return [header for header, _ in self._headers]

        self._require_shared().send_parts(move_share, build_all, on_moved)

    def finish(self, make_manifest: MakeManifest, publish: Callable[[Manifest], Manifest]) -> Manifest:
        """Send the parts with headers. Then rank 0 completes all files, and publishes the checkpoint.

        ``publish`` is called on rank 0 with the manifest when that is written. Return its result.

        All ranks call it. It holds the vote "completing the files".
        """
        shared = self._require_shared()

        def complete() -> bytes:
            shared.complete_uploads([int(record.crc64nvme, 16) for _, record in self._headers])
            return manifest.encode_manifest(publish(self._write_small_files(make_manifest)))

        return manifest.decode_manifest(shared.finish(complete), manifest.NAME)

    def describe_files(self) -> Mapping[str, UploadedFile]:
        """Return the files of the checkpoint by their paths, on rank 0, for the next save that shares some."""
        etags = self._require_shared().etags | (self._copies.etags if self._copies is not None else {})
        return {
            file.path: UploadedFile(file, etags[number], record, header)
            for number, (file, (header, record)) in enumerate(zip(self._plan.files, self._headers, strict=True))
            if etags.get(number)
        }

    def _write_small_files(self, make_manifest: MakeManifest) -> Manifest:
        """Write the files without tensor data, the manifest last, and return it."""
        store, small_files = self.folder.store, self._small_files
        map_requests(lambda name: store.replace_small(self.folder / name, small_files[name]), sorted(small_files))
        records = {file.path: record for file, (_, record) in zip(self._plan.files, self._headers, strict=True)}
        for name, data in small_files.items():
            records[name] = FileRecord(len(data), f"{block_crcs.crc64(data):016x}")
        finished = make_manifest(dict(sorted(records.items())))
        store.replace_small(self.folder / manifest.NAME, manifest.encode_manifest(finished))
        return finished
