"""Removal of a checkpoint of any kind: first out of sight, so that nothing half removed is ever loaded."""

from __future__ import annotations

from pathlib import Path

from holdfast.layout.hidden import Hidden
from holdfast.lightning.published import fresh_id
from holdfast.storage.folders import remove_tree, rename


def remove(path: Path) -> None:
    """Remove a folder, a file or a link; what is not there is fine."""
    hidden = path
    if path.is_dir() and not path.is_symlink():
        hidden = path.parent / Hidden(path.name, fresh_id(), fresh_id(), "removed").name
        rename(path, hidden)
    remove_tree(hidden)
