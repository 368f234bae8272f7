"""What keeps a run's folder in order: leftovers of dead saves, checkpoints that are no longer kept.

Whatever is deleted gets a hidden name first, so that a folder that is half deleted never looks complete.
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
from holdfast.run.scan import CheckpointInfo, displaced_checkpoint
from holdfast.storage.directories import DirectoryLock, remove_tree, rename_noreplace, rename_path
from holdfast.storage.filesystems import is_local
from holdfast.storage.posix import last_change_time, list_hidden_directories, list_names, path_exists

#: Seconds without a change after which a draft is taken for a dead save's.
_MINUTES, _DAY = 600.0, 86_400.0


def clean_up(path: Path, run: str | None = None, *, tag: str | None = None) -> list[Path]:
    """Remove what dead saves of a run have left, or of a tag; of any with ``None``. Returns what is gone.

    A folder that a living process works on is left alone, and so is one of which nobody can tell. Corrupt checkpoints
    go only where all is to go.
    """
    finish_interrupted_replace(path)
    gone = []
    for folder in list_hidden_directories(path):
        hidden = parse_hidden_name(folder.name)
        if hidden is None or run not in {None, hidden.run} or tag not in {None, hidden.tag}:
            continue
        if hidden.state == "corrupt" and (run, tag) != (None, None):
            continue
        with suppress(OSError, StorageError):  # another process is at it, or it may not be touched
            if _remove(folder, hidden):
                gone.append(folder)
    return gone


def clean_up_first_saves(path: Path, tag: str) -> list[Path]:
    """Remove drafts of dead saves of runs that have no checkpoint, as nobody continues these. Returns what is gone.

    Where locks are seen by all who use the file system: those of a tag, which the job is restarted with, and those in
    which nothing has changed for minutes (the file system may be exported). Elsewhere another host's lock may not be
    seen (that of a folder on NFS never is): only those in which nothing has changed for a day.
    """
    drafts = [
        (folder, hidden)
        for folder in list_hidden_directories(path)
        if (hidden := parse_hidden_name(folder.name)) is not None
    ]
    drafts = [(folder, hidden) for folder, hidden in drafts if hidden.state == "partial"]
    if not drafts:
        return []
    runs, sees_locks, gone = {info.run for info in cached_checkpoints(path)}, is_local(path), []
    for folder, hidden in drafts:
        with suppress(OSError, StorageError):  # another process is at it, or it may not be touched
            age = time.time() - last_change_time(folder)
            is_dead = age > (_MINUTES if sees_locks else _DAY) or (sees_locks and hidden.tag == tag)
            if hidden.run not in runs and is_dead and _remove(folder, hidden):
                gone.append(folder)
    return gone


def finish_interrupted_replace(path: Path) -> None:
    """Give a checkpoint its name back that was being replaced when the power went.

    Only where the file system cannot exchange two names is there a moment in which neither folder has it.
    """
    for hidden in displaced_checkpoint(list_names(path)):
        # A save that lives has the lock, and goes on by itself; whoever was faster than this has done it.
        with suppress(OSError, HoldfastError), closing(DirectoryLock(path / hidden.now("partial").name)):
            rename_noreplace(path / hidden.name, path / hidden.tag)


def _remove(folder: Path, hidden: HiddenName) -> bool:
    with closing(DirectoryLock(folder)) as lock:  # from here on it is nobody's, and what is seen of it stays so
        there = list_names(folder.parent)
        waits = hidden.state == "replaced" and hidden.now("partial").name in there
        wanted = hidden.id in {one.id for one in displaced_checkpoint(there)}
        if waits or wanted or not lock.held:
            return False
        remove_tree(folder)
        return True


def expired_checkpoints(path: Path, run: str | None, policy: Retention) -> list[CheckpointInfo]:
    """The checkpoints of a run, or of all runs, that a policy does not keep. Never all.

    Damaged ones do not count, nor do those that somebody has copied, linked or renamed.
    """
    every = [info for info in cached_checkpoints(path) if info.status == "complete" and info.tag == info.saved_as]
    complete = [info for info in every if run in {None, info.run}]
    kept = policy.kept(complete, time.time())
    return [info for info in complete[:-1] if info.id not in kept]


def delete_checkpoints(checkpoints: Sequence[CheckpointInfo]) -> Iterator[CheckpointInfo]:
    """Remove checkpoints, and tell of each when it is gone. What another process removed or replaced is passed over."""
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
    """Another checkpoint has taken the name between two looks. It keeps it, unless one more has."""
    with suppress(TagExistsError):
        rename_noreplace(hidden, path)
    remove_tree(hidden)
