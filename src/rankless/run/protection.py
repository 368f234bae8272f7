"""The protection of checkpoints from being removed to save space: pins, aliases, and files of somebody else in them.

Retention asks it on rank 0 after the commit of a save, ``rankless prune`` in its process. Both ask before and after
they have taken the lock of a removal.
"""

from __future__ import annotations

from pathlib import Path

from rankless.observe.warning import warn_caller
from rankless.run.aliases import has_alias
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.ownership import checkpoint_of
from rankless.run.pin import is_pinned
from rankless.storage.store import store_of


def find_protection(info: CheckpointInfo) -> str | None:
    """Return why a checkpoint must not be removed to save space; ``None`` if nothing is against it."""
    if (claim := find_claim(info)) is not None:
        return claim
    foreign = find_foreign_file(info, info.path)
    return None if foreign is None else f"{foreign} in it is no file of a checkpoint"


def find_claim(info: CheckpointInfo) -> str | None:
    """Return why a checkpoint is still needed; ``None`` if it is not."""
    names = store_of(info.path).list_names(info.path.parent)
    if is_pinned(info, names):
        return "a process has pinned it"
    return "it has an alias" if has_alias(info, names) else None


def find_foreign_file(info: CheckpointInfo, folder: Path) -> str | None:
    """Return the name of a file in a checkpoint's folder that is not the checkpoint's, and would be removed with it."""
    return checkpoint_of(info.saved_as).find_foreign(folder)


def warn_of_foreign(info: CheckpointInfo, foreign: str) -> None:
    """Warn that a checkpoint is not removed because of a file of somebody else in its folder."""
    warn_caller(f"{info.path} is not removed, because {info.path / foreign} is no file of it: move that away")
