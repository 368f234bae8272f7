"""Removal of a checkpoint of any kind.

A folder is renamed to a hidden name first, so that no process loads half of it. In an object store the pointer is the
first object that is removed.

:mod:`rankless.lightning.checkpoints` calls it on rank 0, when the new checkpoint is durable.
"""

from __future__ import annotations

from pathlib import Path

from rankless.observe.warning import warn_caller
from rankless.run.catalog import list_checkpoints
from rankless.run.cleanup import delete_checkpoints
from rankless.run.ownership import Replaceable
from rankless.run.pending_dir import PendingDirectory
from rankless.storage.directory_trees import remove_directory, remove_tree
from rankless.storage.posix import is_directory, is_link
from rankless.storage.store import store_of


def remove_checkpoint(path: Path, replaceable: Replaceable) -> None:
    """Remove a folder, a file or a link. Do nothing if it does not exist, or is pinned in an object store.

    A path that is not ``replaceable`` stays, with a warning.

    Rank 0 calls it, outside of votes.
    """
    if store_of(path).is_remote:
        list(delete_checkpoints([info for info in list_checkpoints(path.parent) if info.tag == path.name]))
    elif (foreign := replaceable.find_foreign(path)) is not None:
        warn_caller(f"{path / foreign if foreign else path} is not removed: it is not {replaceable.text}")
    elif is_directory(path) and not is_link(path):
        remove_directory(path, PendingDirectory(path).removal_path)
    else:
        remove_tree(path)
