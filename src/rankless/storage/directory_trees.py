"""Removal of directories with their contents, and copies of them by hard links.

Clean-ups, retention and pending directories remove with it on rank 0 or in commands; exports of components copy with
it. A directory is renamed to a hidden name before its contents are removed: a reader must never see a part.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath

from rankless.storage.atomic_rename import rename_path
from rankless.storage.links_and_clones import DISK_ERRORS
from rankless.storage.posix import wrap_os_errors

#: The names that an NFS client gives to removed files that its host has open, until they are closed.
_REMOVED_BUT_OPEN = re.compile(r"\.nfs[0-9a-f]{8,}")

#: The bytes that are compared at a time.
_CHUNK = 2**20


def remove_directory(path: Path, hidden: Path) -> None:
    """Remove a directory that others may read. It is renamed first, so that no reader sees a part of it."""
    rename_path(path, hidden)
    remove_tree(hidden)


def remove_tree(path: Path) -> None:
    """Delete a directory and its contents, a file or a link. Missing entries are no error.

    If a process of this host has files of it open on NFS, the client keeps them, and their directories, until they are
    closed. A later call removes the rest.
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
        return _REMOVED_BUT_OPEN.fullmatch(path.name) is not None
    if number == errno.ENOTEMPTY:
        return all(_REMOVED_BUT_OPEN.fullmatch(entry.name) or entry.is_dir() for entry in path.rglob("*"))
    return False


def list_tree(path: Path) -> set[str]:
    """Return the names of all files and links in a directory and below it; of a file or a link, "".

    Directories are not followed through links. Files that are removed, but open on NFS, are left out. Raises
    ``StorageError`` if a directory cannot be listed. For example, ``model/config.json``.
    """
    with wrap_os_errors("list", path):
        if path.is_symlink() or not path.is_dir():
            return {""}
        return {name for name in _list_files(path) if not _REMOVED_BUT_OPEN.fullmatch(PurePosixPath(name).name)}


def has_no_files(path: Path) -> bool:
    """Return whether a directory has no files below it, not even files that are removed, but open on NFS."""
    with wrap_os_errors("list", path):
        return not any(_list_files(path))


def _list_files(path: Path) -> Iterator[str]:
    """Yield the names of all files and links below a directory. ``Path.rglob`` skips unreadable folders."""
    for folder, folders, files in os.walk(path, onerror=partial(_raise_unless_gone, path)):
        links = (name for name in folders if Path(folder, name).is_symlink())
        yield from (str(Path(folder, name).relative_to(path)) for name in (*files, *links))


def _raise_unless_gone(path: Path, error: OSError) -> None:
    """Raise the error of a directory below ``path``. An error of reading its names does not say which one it is."""
    if error.errno not in {errno.ENOENT, errno.ESTALE}:
        with wrap_os_errors("list", Path(error.filename or path)):
            raise error


def find_obstacle(folder: Path, names: Iterable[str]) -> str | None:
    """Return a folder in the place of a file of these names, or another entry in the place of their folders."""
    with wrap_os_errors("list", folder):
        for name in sorted(names):
            if (folder / name).is_dir():
                return name
            for parent in map(str, PurePosixPath(name).parents[:-1]):
                if os.path.lexists(folder / parent) and not _is_real_directory(folder / parent):
                    return parent
    return None


def link_remaining(source: Path, target: Path, excluded: set[str]) -> None:
    """Add the files, links and folders of one directory tree to another, except the files with names in ``excluded``.

    Files are hard-linked. If the file system has no hard links, they are copied. A later call adds the changes.
    """
    with wrap_os_errors("link or copy the contents of", source):
        for name in _walk(source, excluded):
            if _is_real_directory(source / name):
                (target / name).mkdir(exist_ok=True)
            else:
                _link_file(source / name, target / name)


def find_missing(source: Path, target: Path, excluded: set[str]) -> str | None:
    """Return an entry of a directory tree that :func:`link_remaining` has not added to ``target``."""
    with wrap_os_errors("list", source):
        for name in _walk(source, excluded):
            entry, copy = source / name, target / name
            is_there = copy.is_dir() if _is_real_directory(entry) else os.path.lexists(copy) and _is_same(entry, copy)
            if not is_there and not _REMOVED_BUT_OPEN.fullmatch(entry.name):
                return name
    return None


def _walk(folder: Path, excluded: set[str], prefix: str = "") -> Iterator[str]:
    """Yield the names of all entries below a directory, each folder before its contents, except those excluded."""
    for entry in sorted((folder / prefix).iterdir()):
        name = f"{prefix}{entry.name}"
        if name not in excluded:
            yield name
            if _is_real_directory(entry):
                yield from _walk(folder, excluded, f"{name}/")


def _is_real_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_same(source: Path, copy: Path) -> bool:
    """Return whether one file or link is a hard link of the other, or a copy of it as it is now.

    Sizes and times do not tell: somebody may replace a file by another within one tick of the file system's clock.
    """
    if source.is_symlink() or copy.is_symlink():
        return source.is_symlink() and copy.is_symlink() and source.readlink() == copy.readlink()
    return source.samefile(copy) or (source.is_file() and copy.is_file() and _have_equal_bytes(source, copy))


def _have_equal_bytes(source: Path, copy: Path) -> bool:
    """Compare two files. ``filecmp`` does not do: it remembers results by size and time."""
    with source.open("rb") as one, copy.open("rb") as other:
        while (data := one.read(_CHUNK)) == other.read(_CHUNK):
            if not data:
                return True
    return False


def _link_file(source: Path, target: Path) -> None:
    if os.path.lexists(target):
        if _is_same(source, target):
            return
        target.unlink()
    if source.is_symlink():
        target.symlink_to(source.readlink())
        return
    try:
        target.hardlink_to(source)
    except OSError as error:
        if error.errno in {*DISK_ERRORS, errno.EEXIST}:
            raise
        shutil.copy2(source, target)
