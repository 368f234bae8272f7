"""Removes stale directories of dead saves, and checkpoints that are no longer kept, from a run directory.

A checkpoint is renamed to a hidden name before it is deleted, so that a partly deleted directory never looks complete.

A save calls :func:`clean_up` on rank 0 when it begins its output, in the vote "preparing the save", and removes old
checkpoints on rank 0 after the commit, when no rank waits for it. Conversions, components and ``rankless prune`` clean
up, too. The order of a removal must stay: take the lock, look for pins and aliases, rename, look at what was renamed,
delete.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from functools import partial
from pathlib import Path

from rankless.errors import RanklessError, StorageError, TagExistsError
from rankless.formats.native import holds_checkpoint
from rankless.observe.warning import warn_caller
from rankless.ondisk.hidden_names import HiddenName, parse_hidden_name
from rankless.run import tier_parts_removal
from rankless.run.added_metrics import MetricFile, list_metric_files, remove_metrics
from rankless.run.aliases import has_alias
from rankless.run.catalog import cached_checkpoints
from rankless.run.claims import remove_drafts
from rankless.run.journal import JournalEntry, append_entry
from rankless.run.lease import held_lease, remove_if_over
from rankless.run.object_removal import delete_checkpoint_objects, discard_abandoned
from rankless.run.object_run import list_unpublished
from rankless.run.owned_lock import ABANDONED_SECONDS
from rankless.run.ownership import checkpoint_of
from rankless.run.pending_lock import PendingLock, acquire_lock
from rankless.run.pin import is_pinned, remove_dead_pin
from rankless.run.pointers import clock_difference, find_tag, list_tags
from rankless.run.retention import Retention
from rankless.run.scan import CheckpointInfo, displaced_checkpoints, look_at_run
from rankless.storage.atomic_rename import rename_noreplace, rename_path
from rankless.storage.directory_trees import remove_tree
from rankless.storage.object_path import ObjectPath
from rankless.storage.posix import list_names, path_exists
from rankless.storage.store import store_of

#: Seconds without a change after which the pending directory of a dead first save of another job is removed.
_ABANDONED_SECONDS = 600.0


def clean_up(path: Path, run: str | None = None, *, tag: str | None = None, with_whole: bool = False) -> list[Path]:
    """Remove the stale directories of dead saves. Return the removed paths.

    ``run`` and ``tag`` restrict the removal to one run and one tag; ``None`` means all. A directory is kept if a living
    process uses it, or if that is unknown. Hidden corrupt checkpoints are removed only if both are ``None``. In an
    object store, a folder with a manifest that no pointer names may have been copied there: it is kept unless
    ``with_whole``.
    """
    if isinstance(path, ObjectPath):
        return _clean_up_objects(path, with_whole=with_whole)
    finish_interrupted_replace(path)
    listed = list_names(path)
    removed, names = [], _parse_hidden(listed)
    for hidden in names:
        if hidden.state == "lock":
            _remove_lock_file(path, hidden, names)
            continue
        if hidden.state == "pin":
            remove_dead_pin(path / hidden.name)
            continue
        if run not in {None, hidden.run} or tag not in {None, hidden.tag}:
            continue
        if hidden.state == "corrupt" and (run, tag) != (None, None):
            continue
        if _remove_if_dead(path, hidden):
            removed.append(path / hidden.name)
    if run is None:
        _remove_stale_metrics(path)
        remove_drafts(path, ABANDONED_SECONDS)
    if tier_parts_removal.FOLDER in listed:
        removed += tier_parts_removal.remove_superseded_parts(path)
    return removed


def _remove_stale_metrics(path: Path) -> None:
    """Remove metrics that were added to checkpoints that have been removed or replaced since."""
    if not list_metric_files(store_of(path).list_names(path)):  # hardly any run has one, and reading it takes long
        return
    by_id: dict[str, list[CheckpointInfo]] = {}
    for info in cached_checkpoints(path):
        by_id.setdefault(info.id, []).append(info)
    if "" not in by_id:  # a checkpoint that cannot be read now has no id, and may have any metric
        remove_metrics(path, lambda file: not any(info.is_called(file.tag) for info in by_id.get(file.id, ())))


def _is_metric_of(info: CheckpointInfo, file: MetricFile) -> bool:
    return file.id == info.id and info.is_called(file.tag)


def _clean_up_objects(run: ObjectPath, *, with_whole: bool) -> list[Path]:
    """Remove what saves into an object store have left, if nothing of it has changed for a day, by the store's clock.

    No lock tells whether the save is alive. If it is, it finds its uploads aborted, and fails.
    """
    entries = list_tags(run)
    now = time.time() - clock_difference(entries)
    for entry in entries:
        if now - entry.objects[-1].time > ABANDONED_SECONDS:  # else its save may still withdraw it
            for outdated in entry.objects[:-1]:
                run.store.remove_version(outdated.path, outdated.etag)
    unpublished = [folder for folder in list_unpublished(run, entries) if with_whole or not folder.is_whole]
    abandoned = [folder.path for folder in unpublished if not seems_alive(folder.path, folder.time)]
    removed, failures = _discard_abandoned(abandoned)
    for upload, began in run.store.list_uploads(run):  # its reply was lost, and the save has begun another one
        if now - began > ABANDONED_SECONDS:
            run.store.abort_upload(upload)
    for hidden in _list_hidden(run):
        if hidden.state in {"pin", "lock"}:
            remove_if_over(run / hidden.name, ABANDONED_SECONDS)
    _remove_stale_metrics(run)
    removed += tier_parts_removal.remove_superseded_parts(run)
    if failures:
        raise failures[0]
    return removed


def seems_alive(folder: Path, time_of_change: float) -> bool:
    """Return whether the save of a folder in an object store may go on. On a disk, a lock tells it."""
    return isinstance(folder, ObjectPath) and time.time() - time_of_change <= ABANDONED_SECONDS


def _discard_abandoned(folders: Sequence[ObjectPath]) -> tuple[list[Path], list[RanklessError]]:
    """Delete what dead saves have uploaded. Return what was deleted, and why others could not be."""
    removed, failures = list[Path](), list[RanklessError]()
    for folder in folders:
        try:
            removed += [folder] if discard_abandoned(folder) else []
        except RanklessError as error:
            failures.append(error)
    return removed, failures


def clean_up_first_saves(path: Path, tag: str) -> list[Path]:
    """Remove what dead saves of runs without a checkpoint have left. Return the removed paths.

    No process continues such a run; each of its saves may have been replaced since. Remove what belongs to ``tag``,
    with which the job was restarted, and what has not changed for ten minutes. Of ``tag``, also remove what dead saves
    of other runs have replaced.
    """
    left = [hidden for hidden in _list_hidden(path) if hidden.state in {"partial", "replaced", "removed"}]
    if not left:
        return []
    runs = {info.run for info in cached_checkpoints(path)}
    return [
        path / hidden.name
        for hidden in left
        if (hidden.run not in runs or (hidden.tag == tag and hidden.state != "partial"))
        and _remove_if_dead(path, hidden, 0.0 if hidden.tag == tag else _ABANDONED_SECONDS)
    ]


def finish_interrupted_replace(path: Path) -> set[str]:
    """Give the displaced checkpoint its name back if its replacement died between two renames.

    This happens only on file systems that cannot exchange two names. Return the names that were in the directory.

    Loads of rank 0 call it before they look for a checkpoint, without a lock of their own; so it takes the lock of the
    dead save.
    """
    names = list_names(path)
    for hidden in displaced_checkpoints(names):
        # A living save has the lock and continues by itself. Another process may have renamed the checkpoint already.
        with suppress(OSError, RanklessError), closing(PendingLock(path, hidden)):
            rename_noreplace(path / hidden.name, path / hidden.tag)
    return names


def restore_displaced(path: Path, name: HiddenName) -> bool:
    """Give the checkpoint that ``name`` displaced its name back. Return false if it still has no name."""
    for hidden in _find_displaced(path, name):
        with suppress(RanklessError):
            rename_noreplace(path / hidden.name, path / hidden.tag)
    return not _find_displaced(path, name)


def _find_displaced(path: Path, name: HiddenName) -> list[HiddenName]:
    return [hidden for hidden in displaced_checkpoints(list_names(path)) if hidden.id == name.id]


def _list_hidden(path: Path) -> list[HiddenName]:
    return _parse_hidden(store_of(path).list_names(path))


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
        if folder != removal_path:  # an owner that lives against all evidence cannot publish what is left of it
            remove_tree(removal_path)
            rename_path(folder, removal_path)
        remove_tree(removal_path)
        return True
    return False


def expired_checkpoints(
    path: Path, run: str | None, policy: Retention, *, incarnation: int = 0
) -> list[CheckpointInfo]:
    """Return the checkpoints of a run, or of all runs if ``run`` is ``None``, that a policy does not keep.

    There are none for an ``incarnation`` that is not the newest of the run: the job was superseded, and its policy does
    not count any more. The newest checkpoint is always kept. Corrupt, copied, linked and renamed checkpoints are not
    considered. Raises ``StorageError`` if a checkpoint cannot be read now: it may be the newest one.
    """
    scan = look_at_run(path, is_strict=True)
    if run is not None and incarnation and scan.history.has_continued(run, incarnation):
        return []
    candidates = [info for info in scan.checkpoints if info.status == "complete"]
    complete = [info for info in candidates if not info.is_copy and run in {None, info.run}]
    kept = policy.select_kept(complete, time.time())
    return [info for info in complete[:-1] if info.id not in kept]


def find_protection(info: CheckpointInfo) -> str | None:
    """Return why a checkpoint must not be removed to save space; ``None`` if nothing is against it."""
    if (claim := _find_claim(info)) is not None:
        return claim
    foreign = _find_foreign(info, info.path)
    return None if foreign is None else f"{foreign} in it is no file of a checkpoint"


def _find_claim(info: CheckpointInfo) -> str | None:
    """Return why a checkpoint is still needed; ``None`` if it is not."""
    names = store_of(info.path).list_names(info.path.parent)
    if is_pinned(info, names):
        return "a process has pinned it"
    return "it has an alias" if has_alias(info, names) else None


def _find_foreign(info: CheckpointInfo, folder: Path) -> str | None:
    """Return the name of a file in a checkpoint's folder that is not the checkpoint's, and would be removed with it."""
    return checkpoint_of(info.saved_as).find_foreign(folder)


def delete_checkpoints(checkpoints: Sequence[CheckpointInfo]) -> Iterator[CheckpointInfo]:
    """Remove checkpoints, and yield each one after its removal.

    Skip those that have an alias, those that another process has pinned, removed or replaced, and, with a warning,
    those with files of somebody else in them. One that cannot be removed keeps none of the others: its error is raised
    at the end.

    Saves call it on rank 0 after the commit, and ``rankless prune`` in its process.
    """
    failures = []
    for info in checkpoints:
        try:
            if isinstance(info.path, ObjectPath):
                is_deleted = _delete_object_checkpoint(info, info.path)
            else:
                is_deleted = _delete_unprotected(info)
        except RanklessError as error:
            failures.append(error)
            continue
        if is_deleted:
            append_entry(info.path.parent, JournalEntry("removed", time.time(), info.tag, info.step, info.run))
            yield info
    if failures:
        failures[0].add_note(f"{len(failures)} of {len(checkpoints)} checkpoints could not be removed")
        raise failures[0]


def _delete_unprotected(info: CheckpointInfo) -> bool:
    """Delete a checkpoint in a folder, unless it is protected or was replaced. Return whether it is deleted."""
    name = HiddenName(info.tag, info.run, secrets.token_hex(8), "removed")
    try:
        foreign = _find_foreign(info, info.path)
    except StorageError as error:
        warn_caller(f"{info.path} is not removed, because it is not known whether all in it belongs to it: {error}")
        return False
    if foreign:
        _warn_of_foreign(info, foreign)
    if not holds_checkpoint(info.path, info.id) or find_protection(info) is not None:
        return False
    with _lock_removal(info.path.parent, name):
        # Who pins the checkpoint from now on sees the lock, and waits.
        is_deleted = find_protection(info) is None and _delete_checkpoint(info, info.path.parent / name.name)
    if is_deleted:
        remove_metrics(info.path.parent, partial(_is_metric_of, info))
    return is_deleted


def _warn_of_foreign(info: CheckpointInfo, foreign: str) -> None:
    warn_caller(f"{info.path} is not removed, because {info.path / foreign} is no file of it: move that away")


def _delete_object_checkpoint(info: CheckpointInfo, folder: ObjectPath) -> bool:
    """Delete a checkpoint in an object store, unless it is protected or was replaced. Return whether it is deleted."""
    if _find_claim(info) is not None:
        return False
    run, lock = folder.parent, HiddenName(info.tag, info.run, secrets.token_hex(8), "lock")
    with held_lease(run / lock.name):
        # Who pins the checkpoint from now on sees the lease, and waits.
        is_deleted = _find_claim(info) is None and _delete_if_unchanged(info, folder)
    if is_deleted:
        remove_metrics(run, partial(_is_metric_of, info))
    return is_deleted


def _delete_if_unchanged(info: CheckpointInfo, folder: ObjectPath) -> bool:
    """Delete a checkpoint in an object store, unless it was replaced, or has objects of somebody else in it.

    Return whether it is deleted.
    """
    run, entry = folder.parent, find_tag(folder.parent, info.tag)
    if folder.name == info.tag:  # it was copied there
        entry = None
    elif not (holds_checkpoint(folder, info.id) if entry is None else entry.names_checkpoint(info.id)):
        return False
    found = checkpoint_of(info.saved_as).sort_objects(folder)
    if found.foreign:
        _warn_of_foreign(info, min(found.foreign))
        return False
    delete_checkpoint_objects(run, entry, folder, found.owned)
    return True


def _lock_removal(parent: Path, name: HiddenName) -> AbstractContextManager[object]:
    """Take a lock, if possible: no other process removes files, or pins the checkpoint, as long as it is held.

    Without space for the lock file the removal goes on: it is what makes space.
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
        is_removable = is_removable and _find_foreign(info, hidden) is None
    except RanklessError:
        give_back(hidden, info.path)
        raise
    if not is_removable:
        give_back(hidden, info.path)
        return False
    remove_tree(hidden)
    return True


def give_back(hidden: Path, path: Path) -> None:
    """Undo the rename of what took the name after a check. If the name is taken again, give it one next to that.

    It may be anybody's, so it is not removed, and does not stay hidden: hidden directories are cleaned up.
    """
    try:
        rename_noreplace(hidden, path)
    except TagExistsError:
        other = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        rename_noreplace(hidden, other)
        warn_caller(f"{path} was replaced while it was being removed: what was there before is {other} now")
