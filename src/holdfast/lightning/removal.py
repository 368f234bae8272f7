"""Removal of a checkpoint of any kind: first out of sight, so that nothing half removed is ever loaded."""

from __future__ import annotations

from pathlib import Path

from holdfast.drafts import draft_of
from holdfast.storage.folders import remove_tree, rename
from holdfast.storage.local import is_folder


def remove(path: Path) -> None:
    """Remove a folder, a file or a link; what is not there is fine."""
    hidden = path
    if is_folder(path):
        hidden = draft_of(path).with_suffix(".removed")
        rename(path, hidden)
    remove_tree(hidden)
