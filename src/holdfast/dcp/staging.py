"""The staging directory of a DCP save, and how it replaces an older checkpoint."""

from __future__ import annotations

import errno
import re
import weakref
from contextlib import suppress
from pathlib import Path

from holdfast.errors import InvalidArgumentError, StorageError, TagExistsError
from holdfast.formats.dcp import checksums
from holdfast.formats.dcp.folder import METADATA
from holdfast.ondisk.blocks import crc64
from holdfast.ondisk.hidden_names import HiddenName
from holdfast.run.cleanup import finish_interrupted_replace
from holdfast.run.staging_dir import remove_staging
from holdfast.storage import directories, posix
from holdfast.storage.directories import DirectoryLock

#: Names of the files of a DCP checkpoint. They are removed when another checkpoint replaces it.
_DCP_FILES = re.compile(rf"__\d+_\d+\.distcp|{re.escape(METADATA)}|{re.escape(checksums.NAME)}")


class DcpStaging:
    """The staging directory, which rank 0 holds a lock on. All ranks derive its name from the final one."""

    def __init__(self, final: Path, *, overwrite: bool) -> None:
        """Create the staging directory, and remove what an interrupted save left there.

        Raises ``TagExistsError`` if something is in the way, ``StorageError`` if a save is in progress.
        """
        self._final, self.folder, self._displaced = final, staging_path(final), displaced_path(final)
        finish_interrupted_replace(final.parent)
        _check_destination(final, overwrite=overwrite)
        posix.make_durable_directory(final.parent)
        if posix.path_exists(self.folder):
            self._lock = self._acquire_lock()
            self.discard()
        if posix.path_exists(self.folder):
            raise StorageError(
                errno.EBUSY,
                f"{self.folder} was left by an interrupted save and cannot be removed: check the permissions of "
                f"{final.parent}",
            )
        directories.remove_tree(self._displaced)
        posix.make_directory(self.folder)
        self._lock = self._acquire_lock()
        weakref.finalize(self, self._lock.close)  # if a planner fails, nothing calls discard()

    def _acquire_lock(self) -> DirectoryLock:
        busy = StorageError(
            errno.EBUSY, f"{self.folder} exists: another process saves to {self._final}; if none does, remove it"
        )
        try:
            lock = DirectoryLock(self.folder)
        except BlockingIOError as error:
            raise busy from error
        if not lock.held and _list_entries(self.folder):
            lock.close()
            raise busy
        return lock

    def publish(self) -> None:
        """Rename the staging directory to its final name, and remove the checkpoint that had this name."""
        if not posix.path_exists(self._final):
            directories.rename_noreplace(self.folder, self._final)
            return
        directories.exchange_directories(self.folder, self._final, self._displaced)
        with suppress(StorageError):  # the save is complete; the old checkpoint is hidden, and the next save removes it
            directories.remove_tree(self._displaced)

    def discard(self) -> None:
        """Release the lock and remove the staging directory.

        Keeps it if the checkpoint that it was to replace has lost its name. What cannot be removed stays hidden.
        """
        self.close()
        remove_staging(self.folder)

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()


def staging_path(final: Path) -> Path:
    """Return the path of the staging directory.

    It is the same on all ranks and at each save, because planners cache what the first save returned.
    """
    return final.parent / _hidden_name(final).name


def displaced_path(final: Path) -> Path:
    """Return the temporary path of the old checkpoint while it is being replaced."""
    return final.parent / _hidden_name(final).with_state("replaced").name


def _hidden_name(final: Path) -> HiddenName:
    name = f"{crc64(final.name.encode()):016x}"
    return HiddenName(final.name, name, name, "partial")


def _check_destination(final: Path, *, overwrite: bool) -> None:
    if not posix.path_exists(final):
        return
    if not posix.is_directory(final):
        raise TagExistsError(f"{final} exists and is not a folder; choose another path")
    others = [name for name in _list_entries(final) if not _DCP_FILES.fullmatch(name)]
    if others:
        raise TagExistsError(
            f"{final} contains {others[0]!r}, which is not part of a distributed checkpoint and would be lost; choose "
            "another path, or move it away"
        )
    if not overwrite and posix.is_file(final / METADATA):
        raise TagExistsError(f"there is a checkpoint at {final}; choose another path, or pass overwrite=True")


def _list_entries(folder: Path) -> list[str]:
    return sorted(posix.list_names(folder))


def check_same_on_all_ranks(*, use_collectives: bool) -> None:
    """Raise ``InvalidArgumentError`` if ranks do not use collectives to agree that all is written."""
    if not use_collectives:
        raise InvalidArgumentError("an atomic checkpoint needs all ranks to agree: leave use_collectives=True")
