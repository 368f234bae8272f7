"""The files of a component in an object store, which all ranks upload, and rank 0 completes.

A store cannot rename, so the files of a folder appear there one after another. An index that names files of the model
that is replaced is removed first, and the new one is written last: without it no reader takes files of both for one.
Of two jobs that write one folder at the same time at least one fails if they leave a mixture, and no index names it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from rankless.components.component_files import FileSet
from rankless.components.component_output import Destination
from rankless.engine.io.upload_target import FileFrame
from rankless.errors import RanklessError, RankMismatchError
from rankless.formats.sharded.index import files_named_by
from rankless.run.owned_lock import ABANDONED_SECONDS
from rankless.run.unpublished_output import upload_order
from rankless.save.shared_upload import abort_uploads, begin_uploads
from rankless.storage.body import Body
from rankless.storage.object_path import ObjectPath


def component_files(path: ObjectPath, names: Sequence[str], *, folder: bool) -> list[ObjectPath]:
    """Return the final paths of the files of a component."""
    return [path / name if folder else path for name in names]


class ObjectComponentOutput:
    """The files of a component at a path in an object store, on rank 0."""

    def __init__(self, path: ObjectPath, destination: Destination, files: FileSet) -> None:
        self._path, self._destination, self._files = path, destination, files
        self._stale: set[str] = set()

    def begin(self, frames: Sequence[FileFrame]) -> list[str]:
        """Begin the uploads, and return their ids. What dead saves of the same files have left is removed first."""
        files = component_files(self._path, self._files.names, folder=self._destination.folder)
        with suppress(RanklessError):  # a save does not fail because of what another one has left
            self._abort_dead(files)
        return begin_uploads({path: frame.size for path, frame in zip(files, frames, strict=True)}, {})

    def _abort_dead(self, files: Sequence[ObjectPath]) -> None:
        prefix = self._path if self._destination.folder else self._path.parent
        found = self._path.store.list_uploads(prefix)
        abort_uploads(
            [upload for upload, began in found if upload.path in files and time.time() - began > ABANDONED_SECONDS]
        )

    def remove_indexes(self) -> None:
        """Remove the indexes of the component that is replaced. The first new file may appear after that."""
        if not self._destination.folder:
            return
        known = {str(info.path.relative_to(self._path)) for info in self._path.store.list_objects(self._path)}
        keeps_others = self._destination.keeps_others
        self._stale = known & files_named_by(self._path, self._files.stale_names) if keeps_others else known
        for name in sorted(self._stale):
            if name.endswith(".json"):
                self._path.store.remove_file(self._path / name)

    def finish(self, check_files: Callable[[], None]) -> None:
        """Write the small files, those that name others last, and remove what readers would also take for this one.

        ``check_files`` raises ``RankMismatchError`` if a file was replaced. It is called when the indexes are there: of
        two jobs that have written a mixture, at least the one that has written the last index finds it, and removes
        that index.
        """
        store, small_files = self._path.store, self._files.small_files
        etags = {
            name: store.put_object(self._path / name, Body.of(small_files[name]))
            for name in sorted(small_files, key=upload_order)
        }
        for name in sorted(self._stale - self._files.file_names()):
            store.remove_file(self._path / name)
        try:
            check_files()
        except RankMismatchError:
            for name, etag in etags.items():
                if name.endswith(".index.json"):
                    store.remove_version(self._path / name, etag)
            raise
