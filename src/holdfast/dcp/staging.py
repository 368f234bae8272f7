"""The hidden folder that a save writes into, and how it takes the name of what was there before."""

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

#: What belongs to a distributed checkpoint, and goes when another takes its place.
_OWN = re.compile(rf"__\d+_\d+\.distcp|{re.escape(METADATA)}|{re.escape(checksums.NAME)}")


class DcpStaging:
    """Rank 0's hold of the folder. All ranks know its name from the final one."""

    def __init__(self, final: Path, *, overwrite: bool) -> None:
        """Make it. Raises ``TagExistsError`` where something is in the way, ``StorageError`` where a save is under way.

        What a save that died has left there is removed.
        """
        self._final, self.folder, self._aside = final, staging_path(final), displaced_path(final)
        finish_interrupted_replace(final.parent)
        _check(final, overwrite=overwrite)
        posix.make_durable_directory(final.parent)
        if posix.path_exists(self.folder):
            self._lock = self._hold()
            self.discard()
        if posix.path_exists(self.folder):
            raise StorageError(
                errno.EBUSY, f"{self.folder} is a dead save's, and cannot be removed: look at its folder"
            )
        directories.remove_tree(self._aside)
        posix.make_directory(self.folder)
        self._lock = self._hold()
        weakref.finalize(self, self._lock.close)  # where a planner fails, nobody tells that the save has ended

    def _hold(self) -> DirectoryLock:
        busy = StorageError(
            errno.EBUSY, f"{self.folder} is there: another process saves to {self._final}; if none does, remove it"
        )
        try:
            lock = DirectoryLock(self.folder)
        except BlockingIOError as error:
            raise busy from error
        if not lock.held and _entries(self.folder):
            lock.close()
            raise busy
        return lock

    def publish(self) -> None:
        """Give it its final name; what had that is gone then."""
        if not posix.path_exists(self._final):
            directories.rename_noreplace(self.folder, self._final)
            return
        directories.exchange_directories(self.folder, self._final, self._aside)
        with suppress(StorageError):  # the save is done; what is aside is hidden, and the next save removes it
            directories.remove_tree(self._aside)

    def discard(self) -> None:
        """Remove it, unless what it was to replace has lost its name; what cannot be removed stays hidden."""
        self.close()
        remove_staging(self.folder)

    def close(self) -> None:
        """Let go of it."""
        self._lock.close()


def staging_path(final: Path) -> Path:
    """The same on all ranks, and at each save: planners keep what they were told of the first one."""
    return final.parent / _hidden(final).name


def displaced_path(final: Path) -> Path:
    """Where a checkpoint is for a moment that another takes the place of."""
    return final.parent / _hidden(final).now("replaced").name


def _hidden(final: Path) -> HiddenName:
    name = f"{crc64(final.name.encode()):016x}"
    return HiddenName(final.name, name, name, "partial")


def _check(final: Path, *, overwrite: bool) -> None:
    if not posix.path_exists(final):
        return
    if not posix.is_directory(final):
        raise TagExistsError(f"{final} is there, and no folder; choose another path")
    others = [name for name in _entries(final) if not _OWN.fullmatch(name)]
    if others:
        raise TagExistsError(
            f"{final} holds {others[0]!r}, which is no part of a distributed checkpoint and would be lost; choose "
            "another path, or move it away"
        )
    if not overwrite and posix.is_file(final / METADATA):
        raise TagExistsError(f"there is a checkpoint at {final}; choose another path, or pass overwrite=True")


def _entries(folder: Path) -> list[str]:
    return sorted(posix.list_names(folder))


def check_same_on_all_ranks(*, use_collectives: bool) -> None:
    """Raise ``InvalidArgumentError`` where ranks do not tell each other when all is written."""
    if not use_collectives:
        raise InvalidArgumentError("a checkpoint in one step needs all ranks to agree: leave use_collectives=True")
