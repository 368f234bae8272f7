"""Removal in a run directory on a file system: of leftovers of dead saves, and of checkpoints.

A checkpoint is renamed to a hidden name before it is deleted, so that a partly deleted directory never looks complete.

:class:`rankless.run.folder_run_store.FolderRunStore` calls it, on rank 0 of saves and in commands. The order of a
removal must stay: take the lock, look for pins and aliases, rename, look at the renamed directory, delete.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from pathlib import Path

from rankless.errors import RanklessError, StorageError, TagExistsError
from rankless.formats.native import holds_checkpoint
from rankless.observe.warning import warn_caller
from rankless.ondisk.hidden_names import HiddenName, parse_hidden_name
from rankless.run import tier_parts_removal
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.displaced_checkpoints import displaced_checkpoints, finish_interrupted_replace
from rankless.run.owned_lock import ABANDONED_SECONDS
from rankless.run.pending_lock import PendingLock, acquire_lock
from rankless.run.protection import find_foreign_file, find_protection, warn_of_foreign
from rankless.run.run_store import run_store_of
from rankless.run.stored_history import remove_drafts
from rankless.storage.atomic_rename import rename_noreplace, rename_path
from rankless.storage.directory_trees import remove_tree
from rankless.storage.posix import list_names, path_exists

#: Seconds without a change after which the pending directory of a dead first save of another job is removed.
_ABANDONED_SECONDS = 600.0


def remove_dead_directories(path: Path, run: str | None, tag: str | None) -> list[Path]:
    """Remove the hidden directories of dead saves, and dead locks and pins. Return the removed directories.

    ``run`` and ``tag`` restrict the removal to one run and one tag: see :func:`rankless.run.cleanup.clean_up`.
    """
    finish_interrupted_replace(path)
    listed = list_names(path)
    removed, names = [], _parse_hidden(listed)
    for hidden in names:
        if hidden.state == "lock":
            _remove_lock_file(path, hidden, names)
            continue
        if hidden.state == "pin":
            run_store_of(path).is_pin_over(path / hidden.name)
            continue
        if run not in {None, hidden.run} or tag not in {None, hidden.tag}:
            continue
        if hidden.state == "corrupt" and (run, tag) != (None, None):
            continue
        if _remove_if_dead(path, hidden):
            removed.append(path / hidden.name)
    if run is None:
        remove_drafts(path, ABANDONED_SECONDS)
    if tier_parts_removal.FOLDER in listed:
        removed += tier_parts_removal.remove_superseded_parts(path)
    return removed


def clean_up_first_saves(path: Path, tag: str) -> list[Path]:
    """Remove leftovers of dead saves of runs without a checkpoint. Return the removed paths.

    No process continues such a run; each of its saves may have been replaced since. Remove leftovers of ``tag``, which
    the restarted job saves, and leftovers that have not changed for ten minutes. Of ``tag``, also remove checkpoints
    that dead saves of other runs have replaced.
    """
    left = [hidden for hidden in _list_hidden(path) if hidden.state in {"partial", "replaced", "removed"}]
    if not left:
        return []
    runs = {info.run for info in run_store_of(path).look(is_strict=False).checkpoints}
    return [
        path / hidden.name
        for hidden in left
        if (hidden.run not in runs or (hidden.tag == tag and hidden.state != "partial"))
        and _remove_if_dead(path, hidden, 0.0 if hidden.tag == tag else _ABANDONED_SECONDS)
    ]


def _list_hidden(path: Path) -> list[HiddenName]:
    return _parse_hidden(list_names(path))


def _parse_hidden(names: Collection[str]) -> list[HiddenName]:
    return [hidden for name in sorted(names) if (hidden := parse_hidden_name(name)) is not None]


def _remove_lock_file(path: Path, lock: HiddenName, names: Collection[HiddenName]) -> None:
    """Remove the lock file of a dead process that has left nothing else."""
    if not any(hidden.id == lock.id for hidden in names if hidden != lock):
        with suppress(OSError):
            PendingLock(path, lock).close()


def _remove_if_dead(path: Path, hidden: HiddenName, seconds: float = 0.0) -> bool:
    """Remove a hidden directory if its owner is dead, and nothing in it has changed for ``seconds``."""
    folder = path / hidden.name
    # Another process may remove it meanwhile, or use it, or access is denied.
    with suppress(OSError, StorageError), closing(PendingLock(path, hidden)) as lock:
        names = list_names(path)  # while this process holds the lock, the state cannot change
        is_waiting = hidden.state == "replaced" and hidden.with_state("partial").name in names
        is_displaced = hidden.id in {displaced.id for displaced in displaced_checkpoints(names)}
        if is_waiting or is_displaced or not lock.has_dead_owner(folder, seconds):
            return False
        removal_path = path / hidden.with_state("removed").name
        if folder != removal_path:  # an owner that lives against all evidence cannot publish the rest of it
            remove_tree(removal_path)
            rename_path(folder, removal_path)
        remove_tree(removal_path)
        return True
    return False


def delete_unprotected(info: CheckpointInfo) -> bool:
    """Delete a checkpoint in a folder, unless it is protected or was replaced. Return whether it is deleted."""
    name = HiddenName(info.tag, info.run, secrets.token_hex(8), "removed")
    try:
        foreign = find_foreign_file(info, info.path)
    except StorageError as error:
        warn_caller(f"{info.path} is not removed, because it is not known whether all in it belongs to it: {error}")
        return False
    if foreign:
        warn_of_foreign(info, foreign)
    if not holds_checkpoint(info.path, info.id) or find_protection(info) is not None:
        return False
    with _lock_removal(info.path.parent, name):
        # Who pins the checkpoint from now on sees the lock, and waits.
        return find_protection(info) is None and _delete_checkpoint(info, info.path.parent / name.name)


def _lock_removal(parent: Path, name: HiddenName) -> AbstractContextManager[object]:
    """Take a lock, if possible: no other process removes files, or pins the checkpoint, as long as it is held.

    Without space for the lock file the removal goes on: it makes space.
    """
    try:
        return closing(acquire_lock(parent, name))
    except StorageError:
        return nullcontext()


def _delete_checkpoint(info: CheckpointInfo, hidden: Path) -> bool:
    """Remove a checkpoint by way of a hidden name.

    Return false if it is protected now, or another process has removed or replaced it.
    """
    try:
        rename_path(info.path, hidden)
    except StorageError:
        if path_exists(info.path):
            raise
        return False
    try:
        is_removable = holds_checkpoint(hidden, info.id) and find_protection(info) is None
        is_removable = is_removable and find_foreign_file(info, hidden) is None
    except RanklessError:
        give_back(hidden, info.path)
        raise
    if not is_removable:
        give_back(hidden, info.path)
        return False
    remove_tree(hidden)
    return True


def give_back(hidden: Path, path: Path) -> None:
    """Undo the rename of a path that took the name after a check. If the name is taken again, use one next to it.

    It may be anybody's, so it is not removed, and does not stay hidden: hidden directories are cleaned up.
    """
    try:
        rename_noreplace(hidden, path)
    except TagExistsError:
        other = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        rename_noreplace(hidden, other)
        warn_caller(f"{path} was replaced while it was being removed: what was there before is {other} now")
