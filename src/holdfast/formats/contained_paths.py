"""Where the files of a checkpoint may lie: in the folder that was opened, whatever its names are links to."""

from __future__ import annotations

from pathlib import Path

from holdfast.storage import posix


def allowed_root(root: Path) -> tuple[Path, ...]:
    """The folders that hold the files of a checkpoint in ``root``: itself, and in the Hub's cache the blobs beside it.

    There a file is a link from ``snapshots/<revision>/`` to ``blobs/`` of the same repository. ``blobs`` must be a
    folder of the repository itself: as a link it would lead anywhere.
    """
    repository = root.parent.parent
    blobs = repository / "blobs"
    if root.parent.name == "snapshots" and posix.real_path(blobs) == posix.real_path(repository) / "blobs":
        return root, blobs
    return (root,)


def check_contained(path: Path, root: Path) -> None:
    """Raise ``UnsafeNameError`` where a file of a checkpoint is none, or is not in the folder that was opened."""
    posix.check_regular(path, within=allowed_root(root))
