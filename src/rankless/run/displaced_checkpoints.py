"""Checkpoints that have lost their names to a save that replaced them, and died between two renames.

This exists only on file systems that cannot exchange two names. A displaced checkpoint still counts as the checkpoint
of its tag: lists show it, loads give it its name back, and a clean-up does not remove it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import closing, suppress
from pathlib import Path

from rankless.errors import RanklessError
from rankless.ondisk.hidden_names import HiddenName, parse_hidden_name
from rankless.run.pending_lock import PendingLock
from rankless.storage.atomic_rename import rename_noreplace
from rankless.storage.posix import list_names


def displaced_checkpoints(names: Collection[str]) -> Iterator[HiddenName]:
    """Yield the hidden names of checkpoints that were displaced by a replace which was interrupted.

    ``names`` are all names in the run directory. A displaced checkpoint still counts as the checkpoint of its tag,
    because the new one has a pending directory, but has not got the name yet. This state exists only on file systems
    that cannot exchange two names, and lasts only if the save died in it.
    """
    for name in names:
        hidden = parse_hidden_name(name)
        if hidden is None or hidden.state != "replaced" or hidden.tag in names:
            continue
        if hidden.with_state("partial").name in names:
            yield hidden


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
