"""Removal of a checkpoint of any kind: first out of sight, so that nothing half removed is ever loaded."""

from __future__ import annotations

from pathlib import Path

from holdfast.run.staging_dir import staging_path
from holdfast.storage.directories import remove_tree, rename_path
from holdfast.storage.posix import is_directory


def remove_checkpoint(path: Path) -> None:
    """Remove a folder, a file or a link; what is not there is fine."""
    hidden = path
    if is_directory(path):
        hidden = staging_path(path).with_suffix(".removed")
        rename_path(path, hidden)
    remove_tree(hidden)
