"""The files of a component in a pending directory, on rank 0: they get the final name in one step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rankless.components.component_files import FileSet
from rankless.components.destination import Destination
from rankless.engine.io.upload_target import FileFrame
from rankless.errors import StorageError, TagExistsError
from rankless.formats.sharded.index import files_named_by
from rankless.run.cleanup import clean_up
from rankless.run.ownership import COMPONENT_FILE, replaced_by_export
from rankless.run.pending_dir import PendingDirectory
from rankless.storage import directory_trees, posix
from rankless.storage.direct_io import BufferedWriter


class PendingFiles:
    """The files of a component in a pending directory, which rank 0 creates and publishes."""

    def __init__(self, destination: Destination, files: FileSet, frames: Sequence[FileFrame]) -> None:
        """Create the files. Raises ``StorageError``, and leaves nothing behind then."""
        self._destination, self._files, self._frames = destination, files, frames
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

    def publish(self, headers: Sequence[bytes]) -> None:
        """Finish the files with their headers, and give them their final names."""
        for file, frame, header in zip(self._files.files, self._frames, headers, strict=True):
            with BufferedWriter(self.folder / file.name) as writer:
                for offset, data in ((0, header), *frame.known):
                    writer.write(offset, memoryview(data))
                writer.sync()
        for name, data in self._files.small_files.items():
            posix.write_small(self.folder / name, data)
        if self._destination.folder:
            self._publish_folder()
        else:
            (name,) = self._files.file_names()
            posix.fsync_directory(self.folder)
            self._pending.replace(COMPONENT_FILE.check, name)
            with suppress(StorageError):  # the save is complete; what is left is hidden, and the next save removes it
                self._pending.remove_displaced()

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
