"""The output of a component in an object store: files that all ranks upload, and rank 0 completes.

A store cannot rename, so the files of a folder appear there one after another. An index that names files of the
replaced model is removed first, and the new one is written last: without it no reader takes files of both for one.
Until then a hidden record names the files of both models: if the save fails, the next one removes the files that are
left of them. Of two jobs that write one folder at the same time at least one fails if they leave a mixture, and no
index names it.

:class:`~rankless.components.component_content.ComponentContent` has one on every rank; rank 0 completes in the vote
"completing the files". The order must stay: the record, the removal of old indexes, the files, the new indexes, the
removal of stale files.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from rankless.components.component_files import FileSet
from rankless.components.component_output import SavedComponent
from rankless.components.destination import Destination
from rankless.engine.comm.session import WritingRanks
from rankless.engine.io import upload_parts
from rankless.engine.io.requests import KnownFragments, ignore_progress
from rankless.engine.io.upload_target import FileFrame
from rankless.engine.plan.writer_cells import CellGrain
from rankless.errors import RanklessError, RankMismatchError
from rankless.formats.sharded.index import files_named_by
from rankless.process.prepared_types import prepared
from rankless.run.unpublished_output import upload_order
from rankless.save.shared_upload import SharedUpload, abort_dead_uploads, abort_uploads, begin_uploads
from rankless.storage.body import Body
from rankless.storage.object_path import ObjectPath
from rankless.storage.store import Upload


@prepared
class _BegunFiles(msgspec.Struct, frozen=True, array_like=True):
    """The files with uploads that rank 0 has begun: their names, their frames, and the id of each upload."""

    names: list[str] = []
    frames: list[FileFrame] = []
    uploads: list[str] = []


_encode = msgspec.msgpack.Encoder().encode

#: The start of the name of a record of files. The name of the index follows: a folder may have several models.
_RECORD = ".rankless-unfinished-"


class ObjectComponentOutput:
    """A :class:`rankless.components.component_output.ComponentOutput` at ``path`` in an object store."""

    def __init__(self, path: ObjectPath, destination: Destination, ranks: WritingRanks) -> None:
        self._path, self._destination, self._ranks = path, destination, ranks
        self._begun = _BegunFiles()
        #: On rank 0, the files, their uploads, the names of the files that are replaced, and the name of the record;
        #: empty without one.
        self._files: FileSet | None = None
        self._uploads: list[Upload] = []
        self._stale: set[str] = set()
        self._record = ""

    @property
    def grain(self) -> CellGrain:
        """See :class:`ComponentOutput`. Each part of an upload has one sender."""
        return upload_parts.GRAIN

    def begin(self, files: FileSet, frames: Sequence[FileFrame]) -> bytes:
        """See :class:`ComponentOutput`. Leftovers of dead saves of the same files are removed first."""
        self._files, paths = files, self._final_paths(files.names)
        with suppress(RanklessError):  # a save does not fail because of leftovers of another one
            abort_dead_uploads(self._path if self._destination.folder else self._path.parent, paths)
        ids = begin_uploads({path: frame.size for path, frame in zip(paths, frames, strict=True)}, {})
        self._uploads = [Upload(path, upload) for path, upload in zip(paths, ids, strict=True) if upload]
        return _encode(_BegunFiles(files.names, list(frames), ids))

    def _final_paths(self, names: Sequence[str]) -> list[ObjectPath]:
        return [self._path / name if self._destination.folder else self._path for name in names]

    def join(self, begun: bytes) -> None:
        """See :class:`ComponentOutput`."""
        self._begun = msgspec.msgpack.decode(begun, type=_BegunFiles)

    def write(self, component: SavedComponent) -> Path:
        """See :class:`ComponentOutput`. Rank 0 completes the files when all ranks have uploaded."""
        frames = dict(zip(self._final_paths(self._begun.names), self._begun.frames, strict=True))
        upload = SharedUpload(component.plan, self._ranks, frames, self._begun.uploads)
        appear_when_completed = all(self._begun.uploads)  # a file of one part appears as soon as that is sent

        def build_headers(fragments: KnownFragments, _: Sequence[bytes]) -> list[bytes]:
            headers = [component.build_header(number, fragments) for number in range(len(frames))]
            if not appear_when_completed:
                self._prepare_folder()
            return headers

        def complete() -> bytes:
            if appear_when_completed:
                self._prepare_folder()
            upload.complete_uploads()
            self._finish(upload)
            return b""

        upload.send_parts(component.move_share, build_headers, ignore_progress)
        upload.finish(complete)
        return self._path

    def _prepare_folder(self) -> None:
        """Record the files of both models, and remove the indexes of the old one, on rank 0.

        The first new file may appear after that.
        """
        files, store = self._files, self._path.store
        if not self._destination.folder or files is None:
            return
        known = {str(info.path.relative_to(self._path)) for info in store.list_objects(self._path)}
        indexes = [name for name in files.stale_names if name.endswith(".json")]
        record = f"{_RECORD}{indexes[0]}" if indexes else ""
        names = [*files.stale_names, *({record} & known)]
        self._stale = known & files_named_by(self._path, names) if self._destination.keeps_others else known
        recorded = {name: name for name in sorted({*self._stale, *files.names}) if not name.endswith(".json")}
        if record and not recorded.keys() <= {*files.stale_names}:  # else the next save knows all names
            self._record = record
            table = {"metadata": {}, "weight_map": recorded}  # as in an index
            store.replace_small(self._path / record, msgspec.json.encode(table))
        self._stale.discard(self._record)
        for name in sorted(self._stale):
            if name.endswith(".json"):
                store.remove_file(self._path / name)

    def _finish(self, upload: SharedUpload) -> None:
        """Write the small files, those that name others last, and remove files that readers would take for this one.

        When the indexes are there, check that no file was replaced: of two jobs that have written a mixture, at least
        the one that has written the last index finds it, and removes that index.
        """
        if self._files is None:
            return
        store, small_files = self._path.store, self._files.small_files
        etags = {
            name: store.put_object(self._path / name, Body.of(small_files[name]))
            for name in sorted(small_files, key=upload_order)
        }
        for name in [*sorted(self._stale - self._files.file_names()), *([self._record] if self._record else [])]:
            store.remove_file(self._path / name)
        try:
            upload.check_files()
        except RankMismatchError:
            for name, etag in etags.items():
                if name.endswith(".index.json"):
                    store.remove_version(self._path / name, etag)
            raise

    def discard(self) -> None:
        """See :class:`ComponentOutput`. Complete files stay."""
        abort_uploads(self._uploads)
