"""Removal of checkpoints from a run in an object store, and of the leftovers of dead saves there.

Retention and the failure of a save call it on rank 0, ``rankless prune`` in its process. The orders must stay: pointers
are removed before files, and a folder is marked before the look for pointers.
"""

from __future__ import annotations

import errno
import secrets
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from rankless.errors import RanklessError, StorageError
from rankless.formats.native import holds_checkpoint
from rankless.observe.warning import warn_caller
from rankless.ondisk.hidden_names import REMOVED, HiddenName, parse_hidden_name
from rankless.ondisk.manifest import NAME
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.folder_names import FOLDER
from rankless.run.lease import held_lease, remove_if_over
from rankless.run.object_run import list_unpublished
from rankless.run.owned_lock import ABANDONED_SECONDS
from rankless.run.ownership import SAVED_FOLDER, checkpoint_of
from rankless.run.pointers import Pointer, TagEntry, clock_difference, find_tag, is_published, list_tags
from rankless.run.protection import find_claim, warn_of_foreign
from rankless.run.tier_parts_removal import remove_superseded_parts
from rankless.storage.object_path import ObjectPath, as_object
from rankless.storage.store import map_requests, store_of

#: How often a look at a folder is repeated that another process is about to delete, and the seconds between.
_ATTEMPTS, _ATTEMPT_SECONDS = 20, 0.05


def delete_replaced(run: ObjectPath, entry: TagEntry) -> None:
    """Delete a checkpoint that another one has replaced. Objects that somebody else has put into its folder stay."""
    if not isinstance(entry.pointer, Pointer):
        remove_pointers(run, entry)
        return
    folder = entry.folder_in(run)
    found = SAVED_FOLDER.sort_objects(folder)
    delete_checkpoint_objects(run, entry, folder, found.owned)
    if found.foreign:
        warn_caller(f"{folder / min(found.foreign)} stays: it is no file of the checkpoint that was replaced")


def delete_checkpoint_objects(
    run: ObjectPath, entry: TagEntry | None, folder: ObjectPath, names: AbstractSet[str]
) -> None:
    """Delete these objects of a checkpoint that is no longer wanted, after its pointers, if it has any."""
    if entry is not None:
        remove_pointers(run, entry)
    _delete_objects(folder, names)


def remove_pointers(run: ObjectPath, entry: TagEntry) -> None:
    """Remove the pointers of a checkpoint, older ones first: then no tag means its folder.

    Another process may have removed the tag, and have saved it again, with the same number: its pointer stays. Raises
    ``StorageError`` if one is still there. A list does not tell that: it may lag.
    """
    for info in entry.objects:
        run.store.remove_version(info.path, info.etag)
    if any(run.store.find_version(info.path) == info.etag for info in entry.objects):
        raise StorageError(errno.EBUSY, f"{entry.path} could not be deleted, so its checkpoint was left as it is")


def _abort_uploads(folder: ObjectPath) -> None:
    """Abort the uploads into a folder that are in progress."""
    for upload, _ in folder.store.list_uploads(folder):
        folder.store.abort_upload(upload)


def discard_folder(folder: ObjectPath) -> None:
    """Delete the folder of a save that gives its checkpoint up, and abort the uploads into it.

    If it is whole, another process may have given it a tag: then it stays.
    """
    _abort_uploads(folder)  # first: perhaps nothing can be written any more
    if store_of(folder).is_file(folder / NAME):
        discard_abandoned(folder)
    else:
        _delete_objects(folder, {str(info.path.relative_to(folder)) for info in folder.store.list_objects(folder)})


def discard_abandoned(folder: ObjectPath) -> bool:
    """Delete a save's objects in a folder: one of another process, which seems to be dead, or a whole one.

    Return false if a process has published it meanwhile.

    Raises ``StorageError`` or ``CorruptCheckpointError``, and deletes nothing, if that is unknown.

    The process may wake up. So the folder is marked first, and after that it must have no pointer. The save does the
    opposite: it creates the pointer first, and after that looks for the mark. So at least one of both sees the other.
    """
    mark = folder / REMOVED
    folder.store.replace_small(mark, b"")
    is_kept = True
    try:
        match = FOLDER.fullmatch(folder.name)
        is_kept = match is None or is_published(folder.parent, match["tag"], match["id"])
    finally:
        if is_kept:
            folder.store.remove_file(mark)
    if not is_kept:
        _abort_uploads(folder)
        _delete_objects(folder, SAVED_FOLDER.sort_objects(folder).owned | {REMOVED})  # lists may lack the mark yet
    return not is_kept


def is_still_whole(folder: ObjectPath) -> bool:
    """Return whether a folder of another save, which has just got a pointer, has not been deleted meanwhile.

    That save may have given up its checkpoint: it marks the folder, and looks for pointers after that, as
    :func:`discard_abandoned` says. A mark that does not stay is of a save that has found the pointer.
    """
    store = store_of(folder)
    for _ in range(_ATTEMPTS):
        if not store.is_file(folder / REMOVED):
            break
        time.sleep(_ATTEMPT_SECONDS)
    return store.is_file(folder / NAME)


def find_damage(folder: ObjectPath, sizes: Mapping[str, int]) -> str | None:
    """Return why a folder differs from the upload: it lacks one of these files, or another process deletes it.

    The list of a store may lag, or come from a proxy. So each file that it lacks is asked for, and so is the mark.
    """
    if store_of(folder).is_file(folder / REMOVED):
        return (
            f"another process deletes {folder}, because its save seemed to be dead: save again, and let clean-ups "
            "remove only what is a day old"
        )
    listed = {str(info.path.relative_to(folder)): info.size for info in folder.store.list_objects(folder)}
    unlisted = [name for name, size in sizes.items() if listed.get(name) != size]
    stored = dict(zip(unlisted, map_requests(lambda name: _find_size(folder / name), unlisted), strict=True))
    if missing := [name for name, size in stored.items() if size is None]:
        return (
            f"{len(missing)} of {len(sizes)} files of {folder} are not there after the server has confirmed them, such "
            f"as {missing[0]}: check whether something else than rankless removes objects there, or a proxy answers "
            "for the server, and save again"
        )
    if changed := [name for name, size in stored.items() if size != sizes[name]]:
        return (
            f"{folder / changed[0]} has another size than was sent: check whether something else than rankless writes "
            "there, or a proxy answers for the server, and save again"
        )
    return None


def _find_size(path: ObjectPath) -> int | None:
    """Return the size of an object; ``None`` if there is none."""
    try:
        return path.store.file_size(path)
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        return None


def _delete_objects(folder: ObjectPath, names: AbstractSet[str]) -> None:
    """Delete objects in a folder of a save: its manifest first, so that it is no checkpoint any more.

    The files of tensors prove that the folder was ours, and the mark says that it is being deleted: they are the last
    ones.
    """
    tensors = {name for name in names if name.endswith(".safetensors")}
    for batch in ({NAME}, names - tensors - {NAME, REMOVED}, tensors, {REMOVED}):
        map_requests(lambda name: folder.store.remove_file(folder / name), sorted(batch & names))


def remove_abandoned(run: ObjectPath, *, with_whole: bool) -> list[Path]:
    """Remove leftovers of saves, if nothing of them has changed for a day, by the store's clock.

    No lock tells whether the save is alive. If it is, it finds its uploads aborted, and fails. ``with_whole``: see
    :func:`rankless.run.cleanup.clean_up`.
    """
    entries = list_tags(run)
    now = time.time() - clock_difference(entries)
    for entry in entries:
        if now - entry.objects[-1].time > ABANDONED_SECONDS:  # else its save may still withdraw it
            for outdated in entry.objects[:-1]:
                run.store.remove_version(outdated.path, outdated.etag)
    unpublished = [folder for folder in list_unpublished(run, entries) if with_whole or not folder.is_whole]
    abandoned = [as_object(folder.path) for folder in unpublished if not seems_alive(folder.time)]
    removed, failures = _discard_all(abandoned)
    for upload, began in run.store.list_uploads(run):  # its reply was lost, and the save has begun another one
        if now - began > ABANDONED_SECONDS:
            run.store.abort_upload(upload)
    for hidden in map(parse_hidden_name, sorted(run.store.list_names(run))):
        if hidden is not None and hidden.state in {"pin", "lock"}:
            remove_if_over(run / hidden.name, ABANDONED_SECONDS)
    removed += remove_superseded_parts(run)
    if failures:
        raise failures[0]
    return removed


def seems_alive(time_of_change: float) -> bool:
    """Return whether the save of a folder that has changed then may go on: there are no locks."""
    return time.time() - time_of_change <= ABANDONED_SECONDS


def _discard_all(folders: Sequence[ObjectPath]) -> tuple[list[Path], list[RanklessError]]:
    """Delete the uploads of dead saves. Return the deleted folders, and the errors of the others."""
    removed, failures = list[Path](), list[RanklessError]()
    for folder in folders:
        try:
            removed += [folder] if discard_abandoned(folder) else []
        except RanklessError as error:
            failures.append(error)
    return removed, failures


def delete_unprotected(info: CheckpointInfo, folder: ObjectPath) -> bool:
    """Delete a checkpoint, unless it is protected or was replaced. Return whether it is deleted."""
    if find_claim(info) is not None:
        return False
    lock = HiddenName(info.tag, info.run, secrets.token_hex(8), "lock")
    with held_lease(folder.parent / lock.name):
        # Who pins the checkpoint from now on sees the lease, and waits.
        return find_claim(info) is None and _delete_if_unchanged(info, folder)


def _delete_if_unchanged(info: CheckpointInfo, folder: ObjectPath) -> bool:
    """Delete a checkpoint, unless it was replaced, or has objects of somebody else in it.

    Return whether it is deleted.
    """
    run, entry = folder.parent, find_tag(folder.parent, info.tag)
    if folder.name == info.tag:  # it was copied there
        entry = None
    elif not (holds_checkpoint(folder, info.id) if entry is None else entry.names_checkpoint(info.id)):
        return False
    found = checkpoint_of(info.saved_as).sort_objects(folder)
    if found.foreign:
        warn_of_foreign(info, min(found.foreign))
        return False
    delete_checkpoint_objects(run, entry, folder, found.owned)
    return True
