"""Checks that every file of a checkpoint is inside the folder that was opened, after symbolic links are resolved.

Readers of formats with an index or several files check each name before they open it: an index is not trusted. The
check must come before the file is opened, and follow links.
"""

from __future__ import annotations

from pathlib import Path

from rankless.storage import posix
from rankless.storage.store import store_of


def allowed_root(root: Path) -> tuple[Path, ...]:
    """Return the folders that may hold the files of a checkpoint in ``root``.

    They are ``root`` itself and, in the cache of the Hugging Face Hub, the folder ``blobs`` of the repository: there a
    file in ``snapshots/<revision>/`` is a link into ``blobs/``. ``blobs`` must be a real folder of the repository,
    because a link could lead anywhere. ``root`` may also be a folder in the revision, for example the folder of one
    model of several.
    """
    if store_of(root).is_remote:
        return (root,)
    snapshots = next((folder for folder in root.parents if folder.name == "snapshots"), None)
    blobs = None if snapshots is None else snapshots.parent / "blobs"
    if blobs is not None and posix.real_path(blobs) == posix.real_path(blobs.parent) / "blobs":
        return root, blobs
    return (root,)


def check_contained(path: Path, root: Path) -> None:
    """Raise ``UnsafeNameError`` if ``path`` is not a regular file inside ``root``, the folder that was opened."""
    store_of(path).check_regular(path, within=allowed_root(root))
