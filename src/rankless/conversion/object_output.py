"""The output of a conversion in an object store: all ranks upload parts of the files, and no disk holds their tensors.

Rank 0 creates the files of the target in a folder for temporary files, but no tensor is ever written there: they are
sparse. All other bytes of them, such as the records of a zip file, are sent to all ranks, and headers at the end. A
store cannot rename, so the files of a folder appear one after another. Those that name others, such as indexes and
manifests, are the last ones: without them no reader takes a part of a folder for the whole.

:class:`~rankless.conversion.pipeline.Conversion` has one on every rank, in the thread of the caller. Uploads are
completed only when all parts are sent, and files that name others come last.

Each file is completed on the condition that there is none, where the store knows such a condition. A note that is
stored with each upload lets a conversion that fails remove only its own objects.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from rankless.conversion.conversion_output import ConvertedContent, RankShare, ReadBack
from rankless.conversion.target import ConversionTarget, FileLayout, FileSpan
from rankless.conversion.tensor_filter import Key
from rankless.conversion.work_shares import share_by_cells
from rankless.engine.comm.session import WritingRanks
from rankless.engine.comm.vote import COORDINATOR_RANK
from rankless.engine.io import upload_parts
from rankless.engine.io.requests import KnownFragments, OnBytesMoved
from rankless.engine.io.upload_target import FileFrame
from rankless.engine.plan.save_plan import EMPTY_PLAN
from rankless.errors import RanklessError, StateError, TagExistsError
from rankless.process.prepared_types import prepared
from rankless.run.unpublished_output import LocalOutput, upload_order
from rankless.save.shared_upload import SharedUpload, abort_dead_uploads, abort_uploads, begin_uploads
from rankless.storage.direct_io import BufferedReader
from rankless.storage.object_path import ObjectPath
from rankless.storage.posix import file_size, is_directory, read_small, walk_files
from rankless.storage.store import Upload, map_requests


@prepared
class _BegunConversion(msgspec.Struct, frozen=True, array_like=True):
    """The files with uploads that rank 0 has begun, by their names below the final path, and the spans of tensors."""

    names: list[str]
    frames: list[FileFrame]
    uploads: list[str]
    tensors: list[tuple[Key, list[FileSpan]]]
    header_bytes: list[int]


_encode = msgspec.msgpack.Encoder().encode


class ObjectConversionOutput:
    """A :class:`rankless.conversion.conversion_output.ConversionOutput` at ``final`` in an object store."""

    def __init__(self, final: ObjectPath, ranks: WritingRanks) -> None:
        self._final, self._ranks = final, ranks
        self._upload: SharedUpload | None = None
        #: On rank 0, the files without tensor data, the entry of them that is published, the files that have tensors,
        #: by number, their uploads, and the objects that were written otherwise, with their ETags.
        self._local, self._entry = LocalOutput(final), ""
        self._sparse: list[Path] = []
        self._header_bytes: Sequence[int] = ()
        self._uploads: list[Upload] = []
        self._written: dict[ObjectPath, str] = {}
        #: The proof that this conversion has uploaded an object: another one may write equal bytes.
        self._notes = {"rankless": secrets.token_hex(8)}

    @property
    def pending(self) -> Path:
        """See :class:`ConversionOutput`."""
        return self._local.path

    def clean_up(self) -> None:
        """See :class:`ConversionOutput`. Leftovers on this host are removed when the folder is created."""

    def create(self, target: ConversionTarget, nbytes: int, host_of: Sequence[int]) -> RankShare:
        """See :class:`ConversionOutput`. Each part of a file has one rank, whatever the hosts."""
        del nbytes, host_of
        session = self._ranks.session
        _, raw = session.vote("preparing", lambda: None, lambda _: b"", lambda _: self._begin(target))
        begun = msgspec.msgpack.decode(raw, type=_BegunConversion)
        files = [self._final / name if name else self._final for name in begun.names]
        layout = FileLayout(files, dict(begun.tensors), begun.header_bytes)
        sizes = [frame.size for frame in begun.frames]
        shares = share_by_cells(layout, sizes, range(session.size), session.rank, upload_parts.GRAIN)
        plan = replace(EMPTY_PLAN, file_ranges=shares, rank_order=range(session.size))
        self._upload = SharedUpload(plan, self._ranks, dict(zip(files, begun.frames, strict=True)), begun.uploads)
        return RankShare(layout, shares)

    def _begin(self, target: ConversionTarget) -> bytes:
        """Create the files without their tensors, and begin their uploads, on rank 0."""
        self._local.create_new()
        target.create_files()
        layout, self._entry = target.locate_tensors(), target.output_name
        self._sparse, self._header_bytes = list(layout.files), layout.header_bytes
        names = [str(file.relative_to(self._output)) if file != self._output else "" for file in layout.files]
        finals = [self._final / name if name else self._final for name in names]
        with suppress(RanklessError):  # a conversion does not fail because of leftovers of another one
            abort_dead_uploads(self._final.parent if finals == [self._final] else self._final, finals)
        frames = list(map(_frame_file, layout.files, layout.header_bytes, _spans_by_file(layout)))
        sizes = {path: frame.size for path, frame in zip(finals, frames, strict=True)}
        ids = begin_uploads(sizes, self._notes, hides_small=True)
        self._uploads = [Upload(path, upload) for path, upload in zip(finals, ids, strict=True) if upload]
        tensors = [(key, list(spans)) for key, spans in layout.tensors.items()]
        return _encode(_BegunConversion(names, frames, ids, tensors, list(layout.header_bytes)))

    @property
    def _output(self) -> Path:
        return self._local.path / self._entry

    def write(self, content: ConvertedContent, on_moved: OnBytesMoved, read_back: ReadBack | None) -> None:
        """See :class:`ConversionOutput`."""
        upload = self._require_upload()

        def build_headers(fragments: KnownFragments, reports: Sequence[bytes]) -> list[bytes]:
            content.finish(fragments, reports)
            return [_read_bytes(file, 0, nbytes) for file, nbytes in zip(self._sparse, self._header_bytes, strict=True)]

        def complete() -> bytes:
            if self._final.store.path_exists(self._final):
                raise TagExistsError(f"{self._final} exists already; choose another path, or remove it first")
            order = {number: upload_order(file.name) for number, file in enumerate(self._sparse) if file_size(file)}
            last = sorted((number for number, rank in order.items() if rank), key=order.__getitem__)
            upload.complete_uploads(last=last, are_new=True)
            return b""

        upload.send_parts(content.move_share, build_headers, on_moved)
        upload.finish(complete)
        if read_back is not None:
            self._ranks.session.run_on_all("reading back", read_back)

    def _require_upload(self) -> SharedUpload:
        if self._upload is None:
            raise StateError("nothing was begun to be uploaded: this is a bug of rankless")
        return self._upload

    def check_valid(self, target: ConversionTarget) -> None:
        """See :class:`ConversionOutput`. Rank 0 has the files without their tensors."""
        if self._ranks.session.rank == COORDINATOR_RANK:
            target.open_reader()

    def publish(self) -> None:
        """See :class:`ConversionOutput`."""
        self._ranks.session.vote("finishing", lambda: None, lambda _: b"", lambda _: self._publish_small())

    def _publish_small(self) -> bytes:
        """Write the files without tensors, those that name others last, on rank 0.

        Then check that no other job has written into the same folder meanwhile.
        """
        store = self._final.store
        for name in self._list_small():
            path = self._final / name if name else self._final
            if not store.create_object(path, read_small(self._output / name)):
                raise TagExistsError(
                    f"{path} appeared during the conversion, and is left as it is: choose another path"
                )
            self._written[path] = ""  # no other process has created it, also if its version is not known
            self._written[path] = store.find_version(path) or ""
        self._require_upload().check_files()
        self._local.discard()
        return b""

    def _list_small(self) -> list[str]:
        """Return the names of the files that were not uploaded in parts, in their order."""
        if not is_directory(self._output):
            return [] if self._output in self._sparse else [""]
        sent = {file for file in self._sparse if file_size(file)}
        names = [str(file.relative_to(self._output)) for file in walk_files(self._output) if file not in sent]
        return sorted(names, key=upload_order)

    def discard(self) -> None:
        """See :class:`ConversionOutput`."""
        abort_uploads(self._uploads)
        map_requests(self._remove_own, [*(upload.path for upload in self._uploads), *self._written])
        if self._local.is_locked:
            self._local.discard()

    def _remove_own(self, path: ObjectPath) -> None:
        """Remove an object if it is known to be written by this conversion. Others are left."""
        with suppress(RanklessError):
            etag = self._written.get(path) or (
                path.store.find_version(path) if path in self._written else path.store.find_noted(path, self._notes)
            )
            if etag is not None:
                path.store.remove_version(path, etag)


def _spans_by_file(layout: FileLayout) -> list[list[FileSpan]]:
    """Return the spans of tensors in each file, by ascending offsets."""
    by_file: list[list[FileSpan]] = [[] for _ in layout.files]
    for spans in layout.tensors.values():
        for span in spans:
            by_file[span.file].append(span)
    return [sorted(spans, key=lambda span: span.offset) for spans in by_file]


def _frame_file(file: Path, header_bytes: int, spans: Sequence[FileSpan]) -> FileFrame:
    """Return the frame of a file: its size, and its bytes that belong to no tensor and not to its header."""
    size = file_size(file)
    return FileFrame(size, header_bytes, list(_read_gaps(file, header_bytes, spans, size)))


def _read_gaps(file: Path, start: int, spans: Sequence[FileSpan], size: int) -> Iterator[tuple[int, bytes]]:
    for span in spans:
        if start < span.offset:
            yield start, _read_bytes(file, start, span.offset)
        start = max(start, span.offset + span.stop - span.start)
    if start < size:
        yield start, _read_bytes(file, start, size)


def _read_bytes(file: Path, start: int, stop: int) -> bytes:
    data = bytearray(stop - start)
    with BufferedReader(file) as reader:
        reader.read(start, memoryview(data))
    return bytes(data)
