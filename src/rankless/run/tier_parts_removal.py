"""Parts of checkpoints that hosts have put into a run directory from their local tiers, and when they are removed.

They are in the hidden folder ``.parts``, until all parts of a checkpoint are there and it is written from them. The
names of their files begin with the epoch, the sequence number and the id of the checkpoint.

A save cleans up with it on rank 0, in the vote on its preparation; :mod:`rankless.tier.parts_in_run` calls it on rank 0
of a load with a local tier, and in a drain without a job. :mod:`rankless.tier.part_names` makes the names, which are on
disks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rankless.errors import StorageError
from rankless.run.catalog import cached_checkpoints
from rankless.storage.directory_trees import remove_tree
from rankless.storage.file_lock import FileLock
from rankless.storage.object_path import ObjectPath
from rankless.storage.posix import list_names, remove_empty_directory

#: The folder in a run directory.
FOLDER = ".parts"

#: The file that the process locks that writes a checkpoint from parts.
LOCK = "publish.lock"

_NAME = re.compile(r"\d{8}\.(?P<sequence>\d{20})\.(?P<id>[0-9a-f]{16})\..+", re.DOTALL)


def remove_superseded_parts(run: Path) -> list[Path]:
    """Remove the parts of checkpoints that are in the run directory, or older than one there. Return what was removed.

    The folder is removed if nothing else is in it.
    """
    complete = [info for info in cached_checkpoints(run) if info.status == "complete"]
    newest = max((info.sequence for info in complete), default=0)
    ids = {info.id for info in complete}
    return remove_parts(run, lambda sequence, identity: sequence < newest or identity in ids)


def remove_parts(run: Path, is_unwanted: Callable[[int, str], bool]) -> list[Path]:
    """Remove the parts of the checkpoints, given by sequence number and id, that are not wanted.

    If a process writes a checkpoint from parts now, all stay.
    """
    folder, removed = run / FOLDER, list[Path]()
    if isinstance(folder, ObjectPath):
        return _remove_objects(folder, is_unwanted)
    names = list_names(folder)
    if LOCK in names and not _remove_lock(folder / LOCK):
        return removed
    for name in sorted(names):
        match = _NAME.fullmatch(name)
        if match is not None and is_unwanted(int(match["sequence"]), match["id"]):
            remove_tree(folder / name)
            removed.append(folder / name)
    if names <= {LOCK, *(path.name for path in removed)}:
        with suppress(StorageError):  # another process uses it, or has removed it
            remove_empty_directory(folder)
    return removed


def _remove_objects(folder: ObjectPath, is_unwanted: Callable[[int, str], bool]) -> list[Path]:
    """Remove parts from an object store, which has no locks: a process that reads them finds that they were removed."""
    matches = [match for name in folder.store.list_names(folder) if (match := _NAME.fullmatch(name))]
    unwanted = [match.string for match in matches if is_unwanted(int(match["sequence"]), match["id"])]
    for name in sorted(unwanted, key=lambda name: (name.endswith(".data"), name)):  # tables first
        folder.store.remove_file(folder / name)
    return [folder / name for name in sorted(unwanted)]


def _remove_lock(path: Path) -> bool:
    """Remove the lock file, unless a process holds the lock. Return whether none does."""
    try:
        FileLock(path, create=False).remove()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
