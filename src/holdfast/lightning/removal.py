"""Removal of a checkpoint of any kind: it is renamed to a hidden name first, so that no process loads half of it."""

from __future__ import annotations

from pathlib import Path

from holdfast.run.staging_dir import StagingDirectory
from holdfast.storage.directory_trees import remove_directory, remove_tree
from holdfast.storage.posix import is_directory


def remove_checkpoint(path: Path) -> None:
    """Remove a folder, a file or a link. Do nothing if it does not exist."""
    if is_directory(path):
        remove_directory(path, StagingDirectory(path).removal_path)
    else:
        remove_tree(path)
