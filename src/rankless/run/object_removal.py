"""Removal of checkpoints from a run in an object store, and of what dead saves have left there."""

from __future__ import annotations

import errno
from collections.abc import Mapping

from rankless.errors import StorageError
from rankless.ondisk.manifest import NAME
from rankless.run.folder_names import FOLDER, checkpoint_folder
from rankless.run.pointers import Pointer, TagEntry, is_published, list_pointers
from rankless.storage.object_path import ObjectPath
from rankless.storage.store import map_requests

#: The object in a folder that is being deleted, because its save seems to be dead.
_REMOVED = ".removed"


def delete_checkpoint_objects(run: ObjectPath, entry: TagEntry) -> None:
    """Delete a checkpoint that is no longer wanted: its pointer after older ones, then its folder.

    Another process may have removed the tag, and have saved it again, with the same number: its pointer stays.
    """
    for info in entry.objects:
        run.store.remove_version(info.path, info.etag)
    left = {(info.path, info.etag) for info in list_pointers(run, entry.tag)}
    if left & {(info.path, info.etag) for info in entry.objects}:
        raise StorageError(errno.EBUSY, f"{entry.path} could not be deleted, so its checkpoint was left as it is")
    if isinstance(entry.pointer, Pointer):
        delete_prefix(checkpoint_folder(run, entry.tag, entry.pointer.id))


def discard_folder(folder: ObjectPath) -> None:
    """Delete a folder that its own save has not published, and abort the uploads into it."""
    for upload, _ in folder.store.list_uploads(folder):
        folder.store.abort_upload(upload)
    delete_prefix(folder)


def discard_abandoned(folder: ObjectPath) -> bool:
    """Delete a folder that seems to be abandoned by another process. Return false if that has published it meanwhile.

    Raises ``StorageError`` or ``CorruptCheckpointError``, and deletes nothing, if that is unknown.

    The process may wake up. So the folder is marked first, and after that it must have no pointer. The save does the
    opposite: it creates the pointer first, and after that looks for the mark. So at least one of both sees the other.
    """
    mark = folder / _REMOVED
    folder.store.replace_small(mark, b"")
    is_kept = True
    try:
        match = FOLDER.fullmatch(folder.name)
        is_kept = match is None or is_published(folder.parent, match["tag"], match["id"])
    finally:
        if is_kept:
            folder.store.remove_file(mark)
    if not is_kept:
        discard_folder(folder)
    return not is_kept


def is_intact(folder: ObjectPath, sizes: Mapping[str, int]) -> bool:
    """Return whether a folder has all these files with these sizes, and no process has begun to delete it."""
    found = {str(info.path.relative_to(folder)): info.size for info in folder.store.list_objects(folder)}
    return found.items() >= sizes.items() and _REMOVED not in found


def delete_prefix(folder: ObjectPath) -> None:
    """Delete all objects of a checkpoint, its manifest first."""
    paths = [info.path for info in folder.store.list_objects(folder)]
    first, last = folder / NAME, folder / _REMOVED
    for batch in ([first], [path for path in paths if path not in {first, last}], [last]):
        map_requests(folder.store.remove_file, (path for path in batch if path in paths))
