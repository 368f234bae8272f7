"""The files of a component in a pending directory, on rank 0: they get the final name in one step.

:class:`~rankless.components.folder_output.FolderComponentOutput` makes it in the vote "preparing the save" and
publishes in the vote "writing"; :mod:`rankless.components.scheduler_file` does both in one vote. All is synced before
the rename.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rankless.components.component_files import FileSet
from rankless.components.destination import Destination
from rankless.engine.io.upload_target import FileFrame
from rankless.errors import StorageError, TagExistsError
from rankless.formats.sharded.index import files_named_by
from rankless.run.cleanup import clean_up
from rankless.run.ownership import COMPONENT_FILE, replaced_by_export
from rankless.run.pending_dir import PendingDirectory
from rankless.storage import directory_trees, posix
from rankless.storage.direct_io import BufferedReader, BufferedWriter
from rankless.storage.links_and_clones import FileIdentity, Sharing, identify_file


class _FileThere(NamedTuple):
    """A file at its final path."""

    path: Path
    identity: FileIdentity


class PendingFiles:
    """The files of a component in a pending directory, which rank 0 creates and publishes."""

    def __init__(self, destination: Destination, files: FileSet, frames: Sequence[FileFrame]) -> None:
        """Create the files. Raises ``StorageError``, and leaves nothing behind then."""
        self._destination, self._files, self._frames = destination, files, frames
        #: The files, by number, that may be there already, and those that were found unchanged, which are links.
        self._there: dict[int, _FileThere] = {}
        self._kept: set[int] = set()
        clean_up(destination.path.parent, tag=destination.path.name)
        self._pending = PendingDirectory(destination.path)
        self._pending.create(files.nbytes)
        try:
            for file, frame in zip(files.files, frames, strict=True):
                posix.make_parents(self.folder, file.name)
                posix.allocate_space(self.folder / file.name, frame.size)
        except BaseException:
            self.discard()
            raise

    @property
    def folder(self) -> Path:
        """The pending directory."""
        return self._pending.path

    def find_there(self) -> dict[int, Path]:
        """Return the final paths, by number, of files that are there with the same size and bytes of no tensor.

        Called in the vote "preparing the save".
        """
        for number, (file, frame) in enumerate(zip(self._files.files, self._frames, strict=True)):
            path = self._final_path(file.name)
            with suppress(StorageError):  # then the file is written
                identity = identify_file(path)
                if identity is not None and identity.size == frame.size and _has_bytes(path, frame.known):
                    self._there[number] = _FileThere(path, identity)
        return {number: there.path for number, there in self._there.items()}

    def _final_path(self, name: str) -> Path:
        return self._destination.path / name if self._destination.folder else self._destination.path

    def keep_file(self, number: int, header: bytes) -> bool:
        """Link a file with unchanged tensors from its final path, if it has the header. Return whether it is kept.

        It is the same file then when the folder is published, and keeps its times. A link cannot replace a single file:
        that stays where it is.

        Called in the vote "finding unchanged files".

        A file is linked under its own name only: a link between two folders of the user would make one file of two.
        """
        path, identity = self._there[number]
        pending = self.folder / self._files.files[number].name
        if not _has_bytes(path, [(0, header)]):
            return False
        posix.remove_file(pending)
        if not Sharing().link_file(path, pending, identity):
            posix.allocate_space(pending, identity.size)
            return False
        self._kept.add(number)
        return True

    def publish(self, build_header: Callable[[int], bytes]) -> None:
        """Finish the files with their headers, by number, and give them their final names.

        Called in the vote "writing", or, for a scheduler, "saving the scheduler".
        """
        for number, (file, frame) in enumerate(zip(self._files.files, self._frames, strict=True)):
            if number not in self._kept:
                self._finish_file(self.folder / file.name, [(0, build_header(number)), *frame.known])
            elif identify_file(self.folder / file.name) != self._there[number].identity:
                raise StorageError(
                    errno.ESTALE, f"{self._there[number].path} was changed while it was being saved: save again"
                )
        for name, data in self._files.small_files.items():
            posix.write_small(self.folder / name, data)
        if self._destination.folder:
            self._publish_folder()
        elif self._kept and identify_file(self._destination.path) == self._there[0].identity:
            posix.fsync_directory(self._destination.path.parent)
            self.discard()  # a file cannot replace itself
        else:
            (name,) = self._files.file_names()
            posix.fsync_directory(self.folder)
            self._pending.replace(COMPONENT_FILE.check, name)
            with suppress(StorageError):  # the save is complete; leftovers are hidden, and the next save removes them
                self._pending.remove_displaced()

    @staticmethod
    def _finish_file(path: Path, pieces: Iterable[tuple[int, bytes]]) -> None:
        with BufferedWriter(path) as writer:
            for offset, data in pieces:
                writer.write(offset, memoryview(data))
            writer.sync()

    def _publish_folder(self) -> None:
        """Replace the folder in one step."""
        final = self._destination.path
        posix.sync_tree(self.folder)
        if not posix.path_exists(final):
            self._pending.publish()
            return
        self._pending.replace(
            self._keep_others if self._destination.keeps_others else replaced_by_export(final.name).check
        )
        with suppress(StorageError):  # the save is complete; the old folder is hidden, and the next save removes it
            self._pending.remove_displaced()

    def _keep_others(self, folder: Path) -> None:
        """Add the files that are not the component's to the new folder, before it replaces the old one.

        After that, ``folder`` is where the old one is. Raises ``TagExistsError`` if it has got files meanwhile, or has
        a folder where a file of the component goes: the folder is somebody's.
        """
        final = self._destination.path
        if folder == final and not posix.path_exists(final):
            return
        if (obstacle := directory_trees.find_obstacle(folder, self._files.file_names())) is not None:
            raise TagExistsError(
                f"{final / obstacle} is in the way of the files of this save: choose another folder, or move it away"
            )
        replaced = files_named_by(folder, self._files.stale_names) | self._files.file_names()
        if folder == final:
            directory_trees.link_remaining(final, self.folder, replaced)
            posix.sync_tree(self.folder)
        elif missing := directory_trees.find_missing(folder, final, replaced):
            raise TagExistsError(f"{final / missing} appeared while the folder was being saved")

    def discard(self) -> None:
        """Remove the pending directory, unless the folder that it was to replace has already lost its name."""
        self._pending.discard()


def _has_bytes(path: Path, pieces: Iterable[tuple[int, bytes]]) -> bool:
    """Return whether a file has some bytes at their offsets."""
    with BufferedReader(path) as reader:
        for offset, data in pieces:
            stored = bytearray(len(data))
            reader.read(offset, memoryview(stored))
            if stored != data:
                return False
    return True
