"""Tags of abandoned checkpoints: a job that goes back to an older checkpoint can save the later steps again.

The old checkpoint ``step_20`` of incarnation 3 becomes ``step_20@3``. It stays listed, and can be loaded, until a
policy removes it. Rank 0 gives it the new name when it publishes the new checkpoint.

:class:`~rankless.run.pending_dir.PendingDirectory` and :mod:`rankless.save.object_publication` call it in the commit,
in the vote on the writing. After the rename it looks at the renamed directory, and gives that back if it is another
checkpoint: another job may have taken the tag in between.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

from rankless.errors import CheckpointReplacedError, StorageError, TagExistsError
from rankless.formats.native import holds_checkpoint
from rankless.run.checkpoint_info import CheckpointInfo, read_info_strictly
from rankless.run.folder_names import abandoned_tags
from rankless.run.history import KnownCheckpoint
from rankless.run.object_removal import is_still_whole
from rankless.run.pointers import Pointer, TagEntry, find_bytes, find_highest_number, pointer_path
from rankless.run.stored_history import read_history
from rankless.storage.atomic_rename import rename_noreplace
from rankless.storage.object_path import ObjectPath
from rankless.storage.posix import path_exists


def name_abandoned(final: Path, saved: KnownCheckpoint) -> bool:
    """Give the checkpoint at a path another tag if it is an abandoned one of the run of ``saved``, which takes its tag.

    Return whether it has one.
    """
    info = _find_abandoned(final, saved)
    if info is None:
        return False
    for tag in abandoned_tags(final.name, info.incarnation):
        try:
            rename_noreplace(final, final.parent / tag)
        except TagExistsError:
            continue
        except StorageError:
            if path_exists(final):
                raise
            return True  # another process has removed it meanwhile, so its tag is free
        if holds_checkpoint(final.parent / tag, info.id):
            return True
        with suppress(TagExistsError):  # another job has replaced it between the look and the rename
            rename_noreplace(final.parent / tag, final)
        return False
    return False


def _find_abandoned(final: Path, saved: KnownCheckpoint) -> CheckpointInfo | None:
    """Return the checkpoint at a path if it is an abandoned one of the run of ``saved``."""
    try:
        info = read_info_strictly(final, final.name)
    except CheckpointReplacedError:
        return None
    if info is None or info.status != "complete" or (info.run, info.saved_as) != (saved.run, final.name):
        return None
    if info.incarnation == saved.incarnation:  # of the job itself: the history need not be read
        return None
    return None if read_history(final.parent).is_current(info) else info


def name_abandoned_object(run: ObjectPath, entry: TagEntry, saved: KnownCheckpoint) -> bool:
    """Do the same in an object store: give the checkpoint of a tag another one, too. Then the tag is free."""
    pointer = entry.pointer
    if not isinstance(pointer, Pointer) or pointer.run != saved.run or pointer.saved_as:
        return False
    if pointer.incarnation == saved.incarnation:
        return False
    if read_history(run).is_current(pointer):
        return False
    renamed = msgspec.structs.replace(pointer, saved_as=entry.tag)
    for tag in abandoned_tags(entry.tag, pointer.incarnation):
        path, data = pointer_path(run, tag, 1), msgspec.json.encode(renamed)
        if find_highest_number(run, tag) == 0:
            run.store.create_object(path, data)
        if find_bytes(path) == data:
            if not is_still_whole(entry.folder_in(run)):
                run.store.remove_file(path)
            return True
    return False
