"""Removes stale directories of dead saves, and checkpoints that are no longer kept, from a run.

A save calls :func:`clean_up` on rank 0 when it begins its output, in the vote that opens the output, and removes old
checkpoints on rank 0 after the commit, when no rank waits for it. Conversions, components and ``rankless prune`` clean
up, too. How something is removed is the part of the layout: :mod:`rankless.run.folder_removal`,
:mod:`rankless.run.object_removal`.

No vote follows a removal. So other ranks may list old checkpoints for a moment, and rank 0 only warns, or logs if
warnings are errors: an error of its own would leave the others waiting.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from rankless.errors import RanklessError
from rankless.run.added_metrics import MetricFile, list_metric_files, remove_metrics
from rankless.run.catalog import cached_checkpoints
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.journal import JournalEntry, append_entry
from rankless.run.retention import Retention
from rankless.run.run_store import run_store_of
from rankless.storage.store import store_of


def clean_up(path: Path, run: str | None = None, *, tag: str | None = None, with_whole: bool = False) -> list[Path]:
    """Remove the stale directories of dead saves. Return the removed paths.

    ``run`` and ``tag`` restrict the removal to one run and one tag; ``None`` means all. A directory is kept if a living
    process uses it, or if that is unknown. Hidden corrupt checkpoints are removed only if both are ``None``. In an
    object store, a folder with a manifest that no pointer names may have been copied there: it is kept unless
    ``with_whole``.
    """
    if run is None:
        _remove_stale_metrics(path)
    return run_store_of(path).clean_up(run, tag, with_whole=with_whole)


def seems_alive(folder: Path, time_of_change: float) -> bool:
    """Return whether the save of a folder in an object store may go on. On a disk, a lock tells it."""
    return run_store_of(folder.parent).seems_alive(time_of_change)


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


def expired_checkpoints(
    path: Path, run: str | None, policy: Retention, *, incarnation: int = 0
) -> list[CheckpointInfo]:
    """Return the checkpoints of a run, or of all runs if ``run`` is ``None``, that a policy does not keep.

    There are none for an ``incarnation`` that is not the newest of the run: the job was superseded, and its policy does
    not count any more. The newest checkpoint is always kept. Corrupt, copied, linked and renamed checkpoints are not
    considered. Raises ``StorageError`` if a checkpoint cannot be read now: it may be the newest one.
    """
    scan = run_store_of(path).look(is_strict=True)
    if run is not None and incarnation and scan.history.has_continued(run, incarnation):
        return []
    candidates = [info for info in scan.checkpoints if info.status == "complete"]
    complete = [info for info in candidates if not info.is_copy and run in {None, info.run}]
    kept = policy.select_kept(complete, time.time())
    return [info for info in complete[:-1] if info.id not in kept]


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
            is_deleted = run_store_of(info.path.parent).delete(info)
        except RanklessError as error:
            failures.append(error)
            continue
        if is_deleted:
            remove_metrics(info.path.parent, partial(_is_metric_of, info))
            append_entry(info.path.parent, JournalEntry("removed", time.time(), info.tag, info.step, info.run))
            yield info
    if failures:
        failures[0].add_note(f"{len(failures)} of {len(checkpoints)} checkpoints could not be removed")
        raise failures[0]
