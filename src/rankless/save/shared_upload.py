"""The upload of files by all ranks of a session. Rank 0 begins and completes them.

It takes two votes. In the first all ranks send the parts without headers, and rank 0 builds the headers. In the second
the ranks send the parts with headers; then rank 0 completes all files. Until then no file is visible.

Uploads of saves, of single components and of conversions have one on every rank. The order must stay: all parts with
tensor data are sent before the headers are built from their CRCs, and no upload is completed before all parts are sent.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

import msgspec

from rankless.engine.comm.session import WritingRanks
from rankless.engine.comm.store_messages import StoreMessages
from rankless.engine.integrity.crc_gather import HashedResult, vote_with_fragments
from rankless.engine.io import upload_parts
from rankless.engine.io.requests import Fragments, KnownFragments, MoveRanges, OnBytesMoved, ProviderOf
from rankless.engine.io.upload_parts import PartUploader, SentPart, UploadedParts
from rankless.engine.io.upload_target import FileFrame, UploadTarget, check_file_size
from rankless.engine.plan.file_ranges import FileRange
from rankless.engine.plan.save_plan import SavePlan
from rankless.errors import RanklessError, RankMismatchError, StorageError
from rankless.observe.spans import traced
from rankless.ondisk import block_crcs
from rankless.process.prepared_types import prepared
from rankless.run.owned_lock import ABANDONED_SECONDS
from rankless.storage.object_path import ObjectPath
from rankless.storage.store import Upload, map_requests

#: The messages of two attempts in one session do not mix: each has so many rounds.
_ROUNDS = 2**32

#: Builds the headers of all files, on rank 0, from the fragments of all ranks and from their values.
BuildHeaders = Callable[[KnownFragments, Sequence[bytes]], Sequence[bytes]]

_encode = msgspec.msgpack.Encoder().encode


@prepared
class _UploadReport(msgspec.Struct, frozen=True, array_like=True):
    """The report of a rank that has uploaded its parts: its values, and the parts."""

    rank_values: bytes
    sent: list[SentPart]


def begin_uploads(files: Mapping[ObjectPath, int], notes: Mapping[str, str], *, hides_small: bool = False) -> list[str]:
    """Begin the upload of each file that has several parts, and return their ids; empty without one.

    ``files`` have their sizes. ``hides_small``: also of files of one part, which appear as soon as they are sent
    otherwise, and so are kept in memory until then. If it fails, no upload is left.

    Rank 0 calls it in the vote on the preparation, or in the one on unchanged bytes.
    """
    begun: list[Upload] = []

    def create_upload(path: ObjectPath) -> str:
        if files[path] <= upload_parts.GRAIN.nbytes and not (hides_small and files[path]):
            return ""
        upload = path.store.create_upload(path, notes)
        begun.append(upload)
        return upload.id

    for path, size in files.items():
        check_file_size(str(path), size)
    try:
        return map_requests(create_upload, files)
    except BaseException:
        abort_uploads(begun)
        raise


def abort_uploads(uploads: Sequence[Upload]) -> None:
    """Abort uploads, unless they are complete. Uploads that cannot be aborted are left."""

    def abort_quietly(upload: Upload) -> None:
        with suppress(RanklessError):
            upload.path.store.abort_upload(upload)

    map_requests(abort_quietly, uploads)


def abort_dead_uploads(folder: ObjectPath, files: Collection[ObjectPath]) -> None:
    """Abort the uploads of files in a folder that were begun so long ago that their processes are dead.

    Saves of one component and conversions call it on rank 0.
    """
    found = folder.store.list_uploads(folder)
    abort_uploads(
        [upload for upload, began in found if upload.path in files and time.time() - began > ABANDONED_SECONDS]
    )


class SharedUpload:
    """The upload of files with bytes that a plan divides. ``uploads`` is the result of :func:`begin_uploads`."""

    def __init__(
        self, plan: SavePlan, ranks: WritingRanks, files: Mapping[ObjectPath, FileFrame], uploads: Sequence[str]
    ) -> None:
        self._plan, self._ranks = plan, ranks
        self._targets = [
            UploadTarget(path, frame, Upload(path, upload) if upload else None)
            for (path, frame), upload in zip(files.items(), uploads, strict=True)
        ]
        #: The numbers of the files that are sent: others have an empty frame.
        self._sent_files = [number for number, target in enumerate(self._targets) if target.size]
        self._uploaded, self._headers = UploadedParts(), list[bytes]()
        #: On rank 0, the parts that all ranks have sent, and the ETags of the files by number.
        self._sent, self.etags = list[SentPart](), dict[int, str]()

    def send_parts(
        self, send_share: Callable[[MoveRanges], bytes], build_headers: BuildHeaders, on_moved: OnBytesMoved
    ) -> None:
        """Send all parts without headers.

        ``send_share`` calls its argument once, with the bytes of this rank, and returns the values of the rank.

        All ranks call it: it holds the vote "writing".
        """

        def move(file_ranges: Sequence[FileRange], bytes_of: ProviderOf) -> Fragments:
            self._uploaded = self._upload_share(file_ranges, bytes_of, on_moved)
            return self._uploaded.fragments

        def upload_share() -> HashedResult:
            rank_values = send_share(move)
            return HashedResult(self._uploaded.fragments, _encode(_UploadReport(rank_values, self._uploaded.sent)))

        def fold(fragments: KnownFragments, payloads: list[bytes]) -> bytes:
            reports = [msgspec.msgpack.decode(payload, type=_UploadReport) for payload in payloads]
            self._sent = [part for report in reports for part in report.sent]
            return _encode(build_headers(fragments, [report.rank_values for report in reports]))

        decision = vote_with_fragments(self._ranks.session, "writing", upload_share, fold, self._plan.rank_order)
        self._headers = msgspec.msgpack.decode(decision, type=list[bytes])

    @traced("upload", "write")
    def _upload_share(
        self, file_ranges: Sequence[FileRange], bytes_of: ProviderOf, on_moved: OnBytesMoved
    ) -> UploadedParts:
        session, attempt = self._ranks.session, self._ranks.attempt
        uploader = PartUploader(self._plan, self._targets, session.rank, file_ranges, bytes_of)
        messages = StoreMessages(session, attempt * _ROUNDS)
        if not self._plan.needs_exchange:
            return uploader.upload(None, messages, session.size, on_moved)
        from rankless.engine.io.p2p import P2PExchange  # noqa: PLC0415 - it imports torch, which a conversion may lack

        with P2PExchange(self._ranks.group.gloo_group(session.timeout), session, attempt) as p2p:
            return uploader.upload(p2p, messages, session.size, on_moved)

    def finish(self, complete: Callable[[], bytes]) -> bytes:
        """Send the parts with headers. Then rank 0 calls ``complete``. All ranks return its result.

        A file of one part is visible as soon as it is sent. If it is the only one, rank 0 has it, because its header is
        dealt to rank 0, and sends it when no rank can fail any more.

        All ranks call it: it holds the vote "completing the files".
        """

        def send_held() -> list[SentPart]:
            return self._uploaded.send_held(self._targets, self._headers)

        is_last = self._ranks.session.rank == 0 and [target.upload for target in self._targets] == [None]

        def complete_files(posted: list[bytes]) -> bytes:
            by_rank = [msgspec.msgpack.decode(raw, type=list[SentPart]) for raw in posted]
            self._sent += [part for sent in by_rank for part in sent]
            if is_last:
                self._sent += send_held()
            return complete()

        send_headers = list[SentPart] if is_last else send_held
        _, decision = self._ranks.session.vote("completing the files", send_headers, _encode, complete_files)
        return decision

    def path_of(self, number: int) -> ObjectPath:
        """Return the path of a file by its number."""
        return self._targets[number].path

    def check_files(self) -> None:
        """Raise ``RankMismatchError`` if a complete file is not there as this job has uploaded it, on rank 0."""

        def check_file(number: int) -> None:
            path = self._targets[number].path
            if (path.store.find_version(path) or "").strip('"') != self.etags[number].strip('"'):
                raise RankMismatchError(
                    f"{path} is not what this job has uploaded: only one job may save to a path at a time, and all "
                    "ranks need the same settings of the store"
                )

        map_requests(check_file, self.etags)

    @traced("complete the uploads", "commit")
    def complete_uploads(
        self, crcs: Sequence[int] | None = None, *, last: Sequence[int] = (), are_new: bool = False
    ) -> None:
        """Make the files visible, on rank 0. ``crcs`` are their CRCs; without them, the parts' CRCs count.

        The files with the numbers ``last`` appear in this order after all others. If they ``are_new``, raise
        ``TagExistsError`` if a path is taken, as far as the store knows such a condition.
        """
        sent: dict[int, dict[int, SentPart]] = {}
        for part in self._sent:
            sent.setdefault(part.file, {})[part.part] = part

        def complete(number: int) -> None:
            target, of_file = self._targets[number], sent.get(number, {})
            sizes = _part_sizes(target.size)
            if sorted(of_file) != list(range(len(sizes))):
                raise StorageError(errno.EIO, f"not all parts of {target.path} were sent: this is a bug of rankless")
            ordered = [of_file[part] for part in range(len(sizes))]
            receipts = [part.receipt for part in ordered]
            if target.upload is None:
                self.etags[number] = receipts[0]
                return
            parts = ((part.crc64nvme, size) for part, size in zip(ordered, sizes, strict=True))
            crc = crcs[number] if crcs else block_crcs.combine_crcs(parts)
            store = target.path.store
            self.etags[number] = store.complete_upload(target.upload, receipts, target.size, crc, is_new=are_new)

        map_requests(complete, [number for number in self._sent_files if number not in last])
        for number in last:
            complete(number)


def _part_sizes(size: int) -> list[int]:
    step = upload_parts.GRAIN.nbytes
    return [min(step, size - start) for start in range(0, size, step)]
