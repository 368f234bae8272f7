"""Removal of a checkpoint of any kind: it is renamed to a hidden name first, so that no process loads half of it."""

from __future__ import annotations

from pathlib import Path

from holdfast.run.staging_dir import staging_path
from holdfast.storage.directories import remove_tree, rename_path
from holdfast.storage.posix import is_directory


def remove_checkpoint(path: Path) -> None:
    """Remove a folder, a file or a link. Do nothing if it does not exist."""
    hidden = path
    if is_directory(path):
        hidden = staging_path(path).with_suffix(".removed")
        rename_path(path, hidden)
    remove_tree(hidden)
