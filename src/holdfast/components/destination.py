"""The destination of a component: a staging directory, whose file or contents get the final name in one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.components.files import FileSet, FragmentsOf
from holdfast.errors import InvalidArgumentError
from holdfast.formats.sharded.index import files_named_by
from holdfast.run.cleanup import clean_up
from holdfast.run.staging_dir import remove_staging, staging_path
from holdfast.storage import directories, posix


@dataclass(frozen=True)
class Destination:
    """The final path of a component. If ``folder`` is true, it is a directory, otherwise a file."""

    path: Path
    folder: bool

    @classmethod
    def for_path(cls, path: Path, *, folder: bool) -> Destination:
        """Return the destination for a path. Of a symbolic link to a folder, the folder is replaced, not the link."""
        return cls(path.resolve() if folder else path, folder)

    def check_replaceable(self) -> None:
        """Raise ``InvalidArgumentError`` if the path exists and is of the other kind, or cannot be replaced."""
        if self.folder and posix.is_file(self.path):
            raise InvalidArgumentError(f"{self.path} is a file, but shard=True writes a folder: choose another path")
        if not self.folder and posix.is_directory(self.path):
            raise InvalidArgumentError(
                f"{self.path} is a folder, but shard=False writes one file: pass the path of a file"
            )
        if self.folder and Path.cwd().is_relative_to(self.path.resolve()):
            raise InvalidArgumentError(
                f"{self.path} is, or contains, the working directory of this process, which cannot be replaced in one "
                "step: choose another folder"
            )


class ComponentStaging:
    """The files of a save in a staging directory, which rank 0 creates and publishes under their final names."""

    def __init__(self, destination: Destination, files: FileSet) -> None:
        """Create the files. Raises ``StorageError``, and leaves nothing behind then."""
        self._destination, self._files = destination, files
        self.folder = staging_path(destination.path)
        posix.make_durable_directory(self.folder.parent)
        clean_up(self.folder.parent, tag=destination.path.name)
        directories.check_space(self.folder.parent, files.nbytes)
        self._lock = directories.create_locked(self.folder)
        try:
            self.starts: Sequence[Mapping[str, int]] = [
                file.create_file(self.folder / file.name) for file in files.files
            ]
        except BaseException:
            self.remove_staging()
            raise

    def publish(self, fragments_of: FragmentsOf) -> None:
        """Finish the files, and give them their final names."""
        for file in self._files.files:
            file.finish_file(self.folder / file.name, fragments_of)
        for name, data in self._files.small_files.items():
            posix.write_small(self.folder / name, data)
        if self._destination.folder:
            self._publish_folder()
        else:
            (name,) = self._files.file_names()
            posix.fsync_directory(self.folder)
            directories.replace_file(self.folder / name, self._destination.path)
            self.remove_staging()

    def _publish_folder(self) -> None:
        """Replace the folder in one step. Files in it that do not belong to the component are kept."""
        final, displaced = self._destination.path, self.folder.with_suffix(".replaced")
        if not posix.path_exists(final):
            posix.fsync_directory(self.folder)
            directories.rename_noreplace(self.folder, final)
            self._lock.close()
            return
        replaced = files_named_by(final, self._files.stale_names) | self._files.file_names()
        directories.link_remaining(final, self.folder, replaced)
        posix.sync_tree(self.folder)
        directories.exchange_directories(self.folder, final, displaced)
        self._lock.close()
        for folder in (displaced, self.folder):
            directories.remove_tree(folder)

    def remove_staging(self) -> None:
        """Remove the staging directory, unless the folder that it was to replace has already lost its name."""
        self._lock.close()
        remove_staging(self.folder)
