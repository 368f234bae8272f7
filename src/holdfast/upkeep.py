"""What keeps a run's folder in order: leftovers of dead saves, checkpoints that are no longer kept.

Whatever is deleted gets a hidden name first, so that a folder that is half deleted never looks complete.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

from holdfast.catalog import CheckpointInfo, list_checkpoints
from holdfast.errors import StorageError
from holdfast.layout.hidden import Hidden, parse
from holdfast.retention import Retention
from holdfast.storage.folders import Lock, remove_tree, rename
from holdfast.storage.local import exists, hidden_folders


def clean_up(path: Path, run: str | None) -> list[Path]:
    """Remove what dead saves of a run have left, or of any run with ``None``; returns what is gone.

    A folder that a living process works on is left alone, and so is one of which nobody can tell.
    """
    recover(path)
    wanted = {hidden.id for _, hidden in put_aside(path)}
    gone = []
    for folder in hidden_folders(path):
        hidden = parse(folder.name)
        if hidden is None or hidden.id in wanted or run not in {None, hidden.run}:
            continue
        with suppress(OSError, StorageError):  # another process is at it, or it may not be touched
            if _remove(folder):
                gone.append(folder)
    return gone


def recover(path: Path) -> None:
    """Give a checkpoint its name back that was being replaced when the power went.

    Only where the file system cannot exchange two names is there a moment in which neither folder has it.
    """
    for folder, hidden in put_aside(path):
        # A living process is just about to rename, and must find the name free.
        with suppress(OSError, StorageError), closing(Lock(path / hidden.now("partial").name)):
            rename(folder, path / hidden.tag)


def put_aside(path: Path) -> Iterator[tuple[Path, Hidden]]:
    """Checkpoints that were put aside for another, which did not get their name: it is there still, unpublished.

    The next save or load gives them their names back.
    """
    for folder in hidden_folders(path):
        hidden = parse(folder.name)
        if hidden is None or hidden.state != "replaced" or exists(path / hidden.tag):
            continue
        if exists(path / hidden.now("partial").name):
            yield folder, hidden


def _remove(folder: Path) -> bool:
    with closing(Lock(folder)) as lock:
        if lock.held:
            remove_tree(folder)
        return lock.held


def outdated(path: Path, run: str | None, policy: Retention) -> list[CheckpointInfo]:
    """The checkpoints of a run, or of all runs, that a policy does not keep. Never all; damaged ones do not count."""
    complete = [info for info in list_checkpoints(path) if info.status == "complete" and run in {None, info.run}]
    kept = policy.kept(complete, time.time())
    return [info for info in complete[:-1] if info.id not in kept]


def retire(checkpoints: Sequence[CheckpointInfo]) -> Iterator[CheckpointInfo]:
    """Remove checkpoints, and tell of each when it is gone. What another process removed meanwhile is fine."""
    for info in checkpoints:
        hidden = info.path.parent / Hidden(info.tag, info.run, secrets.token_hex(8), "removed").name
        try:
            rename(info.path, hidden)
        except StorageError:
            if exists(info.path):
                raise
            continue
        remove_tree(hidden)
        yield info
