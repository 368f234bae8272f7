"""Where a part is saved: a hidden folder first, whose file or contents get the final name in one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.components.files import FileSet, Found
from holdfast.errors import InvalidArgumentError
from holdfast.formats.sharded.index import files_named_by
from holdfast.run.cleanup import clean_up
from holdfast.run.staging_dir import remove_staging, staging_path
from holdfast.storage import directories, posix


@dataclass(frozen=True)
class Destination:
    """The final path; ``folder`` tells whether it is that of a folder."""

    path: Path
    folder: bool

    @classmethod
    def of(cls, path: Path, *, folder: bool) -> Destination:
        """Of a link to a folder, the folder is replaced and not the link."""
        return cls(path.resolve() if folder else path, folder)

    def check(self) -> None:
        """Raise ``InvalidArgumentError`` where there is something of another kind."""
        if self.folder and posix.is_file(self.path):
            raise InvalidArgumentError(f"{self.path} is a file; with shard=True a folder is written: choose another")
        if not self.folder and posix.is_directory(self.path):
            raise InvalidArgumentError(f"{self.path} is a folder; with shard=False one file is written: name that")
        if self.folder and Path.cwd().is_relative_to(self.path.resolve()):
            raise InvalidArgumentError(
                f"{self.path} is, or holds, the folder this process works in, which cannot be replaced in one step: "
                "choose a folder of its own"
            )


class ComponentStaging:
    """Rank 0's part of a save: the files in a hidden folder, and how they get their final names."""

    def __init__(self, place: Destination, shelf: FileSet) -> None:
        """Make the files. Raises ``StorageError``; nothing is left then."""
        self._place, self._shelf = place, shelf
        self.folder = staging_path(place.path)
        posix.make_durable_directory(self.folder.parent)
        clean_up(self.folder.parent, tag=place.path.name)
        directories.check_space(self.folder.parent, shelf.nbytes)
        self._lock = directories.create_locked(self.folder)
        try:
            self.starts: Sequence[Mapping[str, int]] = [file.make(self.folder / file.name) for file in shelf.files]
        except BaseException:
            self.discard()
            raise

    def finish(self, found: Found) -> None:
        """Complete the files, and publish them."""
        for file in self._shelf.files:
            file.finish(self.folder / file.name, found)
        for name, data in self._shelf.small.items():
            posix.write_small(self.folder / name, data)
        if self._place.folder:
            self._publish_folder()
        else:
            (name,) = self._shelf.names()
            posix.fsync_directory(self.folder)
            directories.replace_file(self.folder / name, self._place.path)
            self.discard()

    def _publish_folder(self) -> None:
        """What else is in the folder that is replaced, stays."""
        final, aside = self._place.path, self.folder.with_suffix(".replaced")
        if not posix.path_exists(final):
            posix.fsync_directory(self.folder)
            directories.rename_noreplace(self.folder, final)
            self._lock.close()
            return
        gone = files_named_by(final, self._shelf.rivals) | self._shelf.names()
        directories.link_remaining(final, self.folder, gone)
        posix.sync_tree(self.folder)
        directories.exchange_directories(self.folder, final, aside)
        self._lock.close()
        for folder in (aside, self.folder):
            directories.remove_tree(folder)

    def discard(self) -> None:
        """Remove what is left of the hidden folder, unless what it was to replace has lost its name."""
        self._lock.close()
        remove_staging(self.folder)
