"""Removes stale directories of dead saves, and checkpoints that are no longer kept, from a run directory.

A checkpoint is renamed to a hidden name before it is deleted, so that a partly deleted directory never looks complete.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

from holdfast.errors import HoldfastError, StorageError, TagExistsError
from holdfast.formats.native import holds_checkpoint
from holdfast.ondisk.hidden_names import HiddenName, parse_hidden_name
from holdfast.run.catalog import cached_checkpoints
from holdfast.run.retention import Retention
from holdfast.run.scan import CheckpointInfo, displaced_checkpoints
from holdfast.storage.directories import DirectoryLock, remove_tree, rename_noreplace, rename_path
from holdfast.storage.filesystems import is_local
from holdfast.storage.posix import last_change_time, list_hidden_directories, list_names, path_exists

#: Seconds without a change after which a staging directory counts as abandoned: if locks are visible, and if not.
_LOCKED_SECONDS, _UNLOCKED_SECONDS = 600.0, 86_400.0


def clean_up(path: Path, run: str | None = None, *, tag: str | None = None) -> list[Path]:
    """Remove the stale directories of dead saves. Return the removed paths.

    ``run`` and ``tag`` restrict the removal to one run and one tag; ``None`` means all. A directory is kept if a living
    process uses it, or if that is unknown. Hidden corrupt checkpoints are removed only if both are ``None``.
    """
    finish_interrupted_replace(path)
    removed = []
    for folder in list_hidden_directories(path):
        hidden = parse_hidden_name(folder.name)
        if hidden is None or run not in {None, hidden.run} or tag not in {None, hidden.tag}:
            continue
        if hidden.state == "corrupt" and (run, tag) != (None, None):
            continue
        with suppress(OSError, StorageError):  # another process removes it, or access is denied
            if _remove_if_dead(folder, hidden):
                removed.append(folder)
    return removed


def clean_up_first_saves(path: Path, tag: str) -> list[Path]:
    """Remove staging directories of dead saves of runs without a checkpoint. Return the removed paths.

    No process continues such a run. If all users of the file system see each other's locks, remove the directories of
    ``tag``, with which the job was restarted, and those without a change for ten minutes (the file system may be
    exported). On other file systems the locks of other hosts may be invisible (on NFS they always are): remove only
    directories without a change for a day.
    """
    partial = [
        (folder, hidden)
        for folder in list_hidden_directories(path)
        if (hidden := parse_hidden_name(folder.name)) is not None
    ]
    partial = [(folder, hidden) for folder, hidden in partial if hidden.state == "partial"]
    if not partial:
        return []
    runs, sees_locks, removed = {info.run for info in cached_checkpoints(path)}, is_local(path), []
    for folder, hidden in partial:
        with suppress(OSError, StorageError):  # another process removes it, or access is denied
            age = time.time() - last_change_time(folder)
            is_dead = age > (_LOCKED_SECONDS if sees_locks else _UNLOCKED_SECONDS) or (sees_locks and hidden.tag == tag)
            if hidden.run not in runs and is_dead and _remove_if_dead(folder, hidden):
                removed.append(folder)
    return removed


def finish_interrupted_replace(path: Path) -> None:
    """Give the displaced checkpoint its name back if its replacement died between two renames.

    This happens only on file systems that cannot exchange two names.
    """
    for hidden in displaced_checkpoints(list_names(path)):
        # A living save has the lock and continues by itself. Another process may have renamed the checkpoint already.
        with suppress(OSError, HoldfastError), closing(DirectoryLock(path / hidden.with_state("partial").name)):
            rename_noreplace(path / hidden.name, path / hidden.tag)


def _remove_if_dead(folder: Path, hidden: HiddenName) -> bool:
    with closing(DirectoryLock(folder)) as lock:  # while this process holds the lock, the state cannot change
        names = list_names(folder.parent)
        is_waiting = hidden.state == "replaced" and hidden.with_state("partial").name in names
        is_displaced = hidden.id in {displaced.id for displaced in displaced_checkpoints(names)}
        if is_waiting or is_displaced or not lock.held:
            return False
        remove_tree(folder)
        return True


def expired_checkpoints(path: Path, run: str | None, policy: Retention) -> list[CheckpointInfo]:
    """Return the checkpoints of a run, or of all runs if ``run`` is ``None``, that a policy does not keep.

    The newest checkpoint is always kept. Corrupt, copied, linked and renamed checkpoints are not considered.
    """
    candidates = [info for info in cached_checkpoints(path) if info.status == "complete" and info.tag == info.saved_as]
    complete = [info for info in candidates if run in {None, info.run}]
    kept = policy.select_kept(complete, time.time())
    return [info for info in complete[:-1] if info.id not in kept]


def delete_checkpoints(checkpoints: Sequence[CheckpointInfo]) -> Iterator[CheckpointInfo]:
    """Remove checkpoints, and yield each one after its removal. Skip those that another process removed or replaced."""
    for info in checkpoints:
        hidden = info.path.parent / HiddenName(info.tag, info.run, secrets.token_hex(8), "removed").name
        if not holds_checkpoint(info.path, info.id):
            continue
        try:
            rename_path(info.path, hidden)
        except StorageError:
            if path_exists(info.path):
                raise
            continue
        if holds_checkpoint(hidden, info.id):
            remove_tree(hidden)
            yield info
        else:
            _restore_name(hidden, info.path)


def _restore_name(hidden: Path, path: Path) -> None:
    """Undo the rename of a checkpoint that took the name after the check. If the name is taken again, remove it."""
    with suppress(TagExistsError):
        rename_noreplace(hidden, path)
    remove_tree(hidden)
