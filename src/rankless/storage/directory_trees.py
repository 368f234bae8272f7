"""Removal of directories with their contents, and copies of them by hard links."""

from __future__ import annotations

import errno
import os
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


def list_tree(path: Path) -> set[str]:
    """Return the names of all files and links in a directory and below it; of a file or a link, "".

    Directories are not followed through links. Files that are removed, but open on NFS, are left out.
    """
    with wrap_os_errors("list", path):
        if path.is_symlink() or not path.is_dir():
            return {""}
        entries = [entry for entry in path.rglob("*") if not entry.name.startswith(_REMOVED_BUT_OPEN)]
        return {str(entry.relative_to(path)) for entry in entries if entry.is_symlink() or not entry.is_dir()}


def link_remaining(source: Path, target: Path, excluded: set[str]) -> None:
    """Add the entries of one directory to another, except names in ``excluded``.

    Files are hard-linked. If the file system has no hard links, they are copied. A later call adds what has changed.
    """
    with wrap_os_errors("link or copy the contents of", source):
        for entry in sorted(source.iterdir()):
            if entry.name not in excluded:
                _link_tree(entry, target / entry.name)


def find_missing(source: Path, target: Path, excluded: set[str]) -> str | None:
    """Return an entry of ``source``, or of a folder in it, that :func:`link_remaining` has not added to ``target``."""
    with wrap_os_errors("list", source):
        for entry in sorted(source.iterdir()):
            copy = target / entry.name
            if entry.name in excluded or entry.name.startswith(_REMOVED_BUT_OPEN):
                continue
            if entry.is_dir() and not entry.is_symlink() and copy.is_dir():
                if (name := find_missing(entry, copy, set())) is not None:
                    return f"{entry.name}/{name}"
            elif not os.path.lexists(copy) or not _is_same(entry, copy):
                return entry.name
    return None


def _is_same(source: Path, copy: Path) -> bool:
    """Return whether one file or link is a hard link of the other, or a copy of it as it is now."""
    one, other = source.lstat(), copy.lstat()
    if source.is_symlink():
        return copy.is_symlink() and source.readlink() == copy.readlink()
    return os.path.samestat(one, other) or (one.st_size, one.st_mtime_ns) == (other.st_size, other.st_mtime_ns)


def _link_tree(source: Path, target: Path) -> None:
    if os.path.lexists(target) and (source.is_symlink() or not source.is_dir()):
        if _is_same(source, target):
            return
        target.unlink()
    if source.is_symlink():
        target.symlink_to(source.readlink())
    elif source.is_dir():
        target.mkdir(exist_ok=True)
        for entry in sorted(source.iterdir()):
            _link_tree(entry, target / entry.name)
    else:
        try:
            target.hardlink_to(source)
        except OSError as error:
            if error.errno not in {errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.EXDEV}:
                raise
            shutil.copy2(source, target)
