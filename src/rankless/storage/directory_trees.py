"""Removal of directories with their contents, and copies of them by hard links."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from rankless.storage.atomic_rename import rename_path
from rankless.storage.posix import wrap_os_errors

#: The start of the names that an NFS client gives to removed files that its host has open, until they are closed.
_REMOVED_BUT_OPEN = ".nfs"


def remove_directory(path: Path, hidden: Path) -> None:
    """Remove a directory that others may read. It is renamed first, so that no reader sees a part of it."""
    rename_path(path, hidden)
    remove_tree(hidden)


def remove_tree(path: Path) -> None:
    """Delete a directory and its contents, a file or a link. Missing entries are no error.

    If a process of this host has files of it open on NFS, the client keeps them, and their directories, until they are
    closed. A later call removes what is left.
    """
    with wrap_os_errors("remove", path):
        if path.is_symlink() or path.is_file():
            path.unlink(missing_ok=True)
            return
        shutil.rmtree(path, ignore_errors=False, onerror=_raise_unless_missing)


def _raise_unless_missing(
    _function: object, path: str, info: tuple[type[BaseException], BaseException, object]
) -> None:
    error = info[1]
    number = error.errno if isinstance(error, OSError) else None
    if number not in {errno.ENOENT, errno.ESTALE} and not _is_removed_but_open(Path(path), number):
        raise error


def _is_removed_but_open(path: Path, number: int | None) -> bool:
    """Return whether a file is removed already, or a directory has no other files, and a process has them open."""
    if number == errno.EBUSY:
        return path.name.startswith(_REMOVED_BUT_OPEN)
    if number == errno.ENOTEMPTY:
        return all(entry.name.startswith(_REMOVED_BUT_OPEN) or entry.is_dir() for entry in path.rglob("*"))
    return False


def link_remaining(source: Path, target: Path, excluded: set[str]) -> None:
    """Add the entries of one directory to another, except names in ``excluded`` and names that exist there.

    Files are hard-linked. If the file system has no hard links, they are copied.
    """
    with wrap_os_errors("link or copy the contents of", source):
        for entry in sorted(source.iterdir()):
            if entry.name not in excluded and not (target / entry.name).exists():
                _link_tree(entry, target / entry.name)


def _link_tree(source: Path, target: Path) -> None:
    if source.is_symlink():
        target.symlink_to(source.readlink())
    elif source.is_dir():
        target.mkdir()
        for entry in sorted(source.iterdir()):
            _link_tree(entry, target / entry.name)
    else:
        try:
            target.hardlink_to(source)
        except OSError as error:
            if error.errno not in {errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.EXDEV}:
                raise
            shutil.copy2(source, target)
