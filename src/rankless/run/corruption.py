"""Checkpoints that a load found corrupt. They are hidden when the run that continued without them saves again.

No save removes them: ``rankless prune --leftovers`` does. In an object store, a checkpoint without a pointer is hidden.

:mod:`rankless.load.selection` records on rank 0 what a load found corrupt, and all ranks get the records with its
decision. The next saves of the process pass them on, and :mod:`rankless.save.folder_output` and
:mod:`rankless.save.object_publication` use them on rank 0, in the commit and after it. A checkpoint that has changed
since the record must keep its name.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from rankless.errors import CheckpointReplacedError, TagExistsError
from rankless.ondisk.hidden_names import HiddenName
from rankless.run.catalog import cached_checkpoints
from rankless.run.object_removal import remove_pointers
from rankless.run.pointers import Pointer, TagEntry, find_tag
from rankless.run.scan import read_info
from rankless.storage import atomic_rename, posix
from rankless.storage.object_path import ObjectPath


class CorruptRecord(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint that was found corrupt: its tag, and the state of all its files at that time.

    If a file has changed since, the checkpoint may have been repaired or replaced. In an object store no file changes:
    the state is the checkpoint's id, or "" if that cannot be read.
    """

    tag: str
    state: str

    @classmethod
    def of(cls, run: Path, tag: str, identity: str) -> CorruptRecord:
        """Record the present state of the checkpoint with a tag and an id in a run directory."""
        return cls(tag, identity if isinstance(run, ObjectPath) else posix.tree_state(run / tag))

    def is_named_by(self, entry: TagEntry) -> bool:
        """Return whether the pointer of a tag in an object store names this checkpoint."""
        return entry.tag == self.tag and entry.names_checkpoint(self.state)

    def is_in(self, folder: Path) -> bool:
        """Return whether a directory holds this checkpoint, unchanged; in an object store, whether the tag does."""
        if isinstance(folder, ObjectPath):
            infos = cached_checkpoints(folder.parent)
            return any((info.tag, info.id) == (folder.name, self.state) for info in infos)
        return bool(self.state) and posix.tree_state(folder) == self.state


def find_corrupt(records: Iterable[CorruptRecord], path: Path, tag: str) -> CorruptRecord | None:
    """Return the record of the checkpoint that has the tag in a run directory, or ``None``."""
    return next((record for record in records if record.tag == tag and record.is_in(path / tag)), None)


def set_aside_corrupt(records: Iterable[CorruptRecord], path: Path, run: str) -> Iterator[Path]:
    """Hide the recorded checkpoints that ``run`` has saved, so that their tags are free. Yield the hidden paths.

    A checkpoint that was renamed, copied or repaired since is left unchanged.

    Rank 0 calls it after the commit of a save.
    """
    if isinstance(path, ObjectPath):
        yield from _remove_pointers_to_corrupt(records, path, run)
        return
    for record in records:
        folder, hidden = path / record.tag, path / HiddenName(record.tag, run, secrets.token_hex(8), "corrupt").name
        if not record.is_in(folder) or not _is_saved_by(run, folder, record.tag):
            continue
        atomic_rename.rename_path(folder, hidden)
        if record.is_in(hidden):
            yield hidden
        else:  # another checkpoint took the name between the check and the rename
            with suppress(TagExistsError):
                atomic_rename.rename_noreplace(hidden, folder)


def _remove_pointers_to_corrupt(records: Iterable[CorruptRecord], path: ObjectPath, run: str) -> Iterator[Path]:
    for record in records:
        entry = find_tag(path, record.tag)
        if entry is None or not isinstance(entry.pointer, Pointer):
            continue
        if record.is_named_by(entry) and entry.pointer.run == run:
            remove_pointers(path, entry)
            yield entry.folder_in(path)


def _is_saved_by(run: str, folder: Path, tag: str) -> bool:
    with suppress(CheckpointReplacedError):
        info = read_info(folder, tag)
        return info is not None and info.run == run and info.saved_as == tag
    return False
