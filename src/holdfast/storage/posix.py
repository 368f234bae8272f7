"""Files of the local (or a shared) POSIX file system: small files, names, durability.

Every ``OSError`` leaves here as ``StorageError`` with the path in it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from os import PathLike
from pathlib import Path
from typing import BinaryIO

from holdfast.errors import HoldfastError, InvalidArgumentError, StorageError, UnsafeNameError

#: What opening a folder, whatever is in it, fails with where it is none.
_NO_FOLDER = {errno.ENOTDIR, errno.ELOOP}

#: What looking at a file fails with where there is none, or none that this process may look at.
_NO_FILE = {errno.ENOENT, errno.EACCES, *_NO_FOLDER}


@contextmanager
def wrap_os_errors(action: str, path: object) -> Iterator[None]:
    """Turn an ``OSError`` into a ``StorageError`` that says what could not be done to which path."""
    try:
        yield
    except HoldfastError:
        raise
    except OSError as error:
        raise StorageError(error.errno, f"could not {action} {path}: {os.strerror(error.errno or 0)}") from error


def local_path(path: str | PathLike[str]) -> Path:
    """An absolute path. Raises ``InvalidArgumentError`` for an address of an object store."""
    if "://" in str(path):
        raise InvalidArgumentError(
            f"{path} is not a path of a file system; object stores are not supported yet: use a local or shared folder"
        )
    return Path(path).absolute()


def make_directory(path: Path) -> None:
    """Create a folder and its parents; one that exists is fine."""
    with wrap_os_errors("create the folder", path):
        path.mkdir(parents=True, exist_ok=True)


def make_durable_directory(path: Path) -> None:
    """Create a folder and its parents, and make the names of those that were not there durable."""
    with wrap_os_errors("look at", path):
        missing = list(takewhile(lambda folder: not folder.exists(), (path, *path.parents)))
    make_directory(path)
    for folder in missing:
        fsync_directory(folder.parent)


def make_parents(root: Path, name: str) -> None:
    """Create the folders that file ``name`` is in below ``root``, which is not made again where it is gone."""
    with wrap_os_errors("create the folders of", root / name):
        for folder in reversed(Path(name).parents[:-1]):
            (root / folder).mkdir(exist_ok=True)


def write_small(path: Path, data: bytes) -> None:
    """Write a new small file and make its bytes durable."""
    with wrap_os_errors("write", path), path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A new file, to be written from its start on; when that is done, its bytes are not durable yet."""
    with wrap_os_errors("write", path), path.open("xb") as file:
        yield file


def allocate_space(path: Path, size: int) -> None:
    """Create a new file of ``size`` bytes, so that others may write into any part of it."""
    with wrap_os_errors("create", path):
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        try:
            os.ftruncate(fd, size)
        finally:
            os.close(fd)


def fsync_directory(path: Path) -> None:
    """Make the names in a folder durable."""
    _sync(path, os.O_DIRECTORY)


def sync_tree(path: Path) -> None:
    """Make a file, or a folder and all in it, durable; but for the name in the folder above."""
    for below in sorted(path.rglob("*"), reverse=True) if path.is_dir() else []:
        _sync(below)
    _sync(path)


def _sync(path: Path, flags: int = 0) -> None:
    with wrap_os_errors("sync", path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def check_regular(path: Path, *, within: tuple[Path, ...]) -> None:
    """The path is a regular file whose real place is inside one of the folders. Raises ``UnsafeNameError``."""
    with wrap_os_errors("look at", path):
        real = Path(os.path.realpath(path, strict=True))
        if not any(real.is_relative_to(folder.resolve()) for folder in within):
            raise UnsafeNameError(f"{path} is a link to {real}, outside of the checkpoint: refused")
        if not stat.S_ISREG(real.stat().st_mode):
            raise UnsafeNameError(f"{path} is not a regular file: refused")


def real_path(path: Path) -> Path:
    """Where a path leads when all links are followed; what is not there is as it is called."""
    with wrap_os_errors("look at", path):
        return Path(os.path.realpath(path))


def read_small(path: Path, limit: int = 2**30) -> bytes:
    """All bytes of a small file. Raises ``StorageError`` when it has more than ``limit``."""
    with wrap_os_errors("read", path), path.open("rb") as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise OSError(errno.EFBIG, f"{path} has more than {limit} bytes")
        return file.read()


def size_of(path: Path) -> int:
    """A file's size in bytes."""
    with wrap_os_errors("read", path):
        return path.stat().st_size


def disk_usage(path: Path) -> tuple[float, int] | None:
    """When a folder last changed, in seconds since 1970, and the bytes of the disk that its files take.

    ``None`` where it is gone.
    """
    with wrap_os_errors("look at", path):
        try:
            return path.stat().st_mtime, sum(file.lstat().st_blocks * 512 for file in path.rglob("*"))
        except FileNotFoundError:
            return None


def last_change_time(path: Path) -> float:
    """When a folder or anything in it last changed, in seconds since 1970. Raises ``StorageError`` if it is gone."""
    with wrap_os_errors("look at", path):
        return max(entry.lstat().st_mtime for entry in (path, *path.rglob("*")))


def tree_state(path: Path) -> str:
    """A digest of what tells the files in a folder from others: names, inodes, sizes, times. Nothing if it is gone."""
    with wrap_os_errors("look at", path):
        try:
            states = [(str(file.relative_to(path)), file.stat()) for file in sorted(path.rglob("*"))]
        except FileNotFoundError:
            return ""
    told = [(name, one.st_ino, one.st_size, one.st_mtime_ns) for name, one in states if stat.S_ISREG(one.st_mode)]
    return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest() if told else ""


def path_exists(path: Path) -> bool:
    """Whether there is anything of this name."""
    with wrap_os_errors("look at", path):
        return path.exists()


def is_directory(path: Path) -> bool:
    """Whether there is such a folder."""
    with wrap_os_errors("look at", path):
        return path.is_dir()


def is_file(path: Path) -> bool:
    """Whether there is such a file; not where this process may not look."""
    with wrap_os_errors("look at", path):
        try:
            return path.is_file()
        except PermissionError:
            return False


def is_taken(path: Path) -> bool:
    """Whether there is anything of this name but a folder: a file, or what is in its place, such as a FIFO."""
    with wrap_os_errors("look at", path):
        try:
            return path.exists() and not path.is_dir()
        except PermissionError:
            return False


def list_files(path: Path) -> list[Path]:
    """All in a folder that is no folder, hidden ones too; none where there is no such folder.

    What is no regular file, such as a FIFO, is among them, so that who wants to read it refuses it by name.
    """
    with wrap_os_errors("list", path):
        try:
            return sorted(entry for entry in path.iterdir() if not entry.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return []


def list_names(path: Path) -> set[str]:
    """The names in a folder, as they were at one moment; none where there is no such folder."""
    with wrap_os_errors("list", path):
        try:
            with os.scandir(path) as entries:
                return {entry.name for entry in entries}
        except (FileNotFoundError, NotADirectoryError):
            return set()


def is_directory_without(path: Path, name: str) -> bool:
    """Whether there is something at a path that holds no such file; ``False`` where there is nothing, or not any more.

    Told of one and the same folder: another may have its name meanwhile.
    """
    with wrap_os_errors("look at", path):
        try:
            folder = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return path.is_symlink()
        except OSError as error:
            if error.errno in _NO_FOLDER:
                return True
            raise
        try:
            return not _has_file(folder, name) and os.path.samestat(os.fstat(folder), path.stat())
        except FileNotFoundError:
            return False
        finally:
            os.close(folder)


def _has_file(folder: int, name: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=folder).st_mode)
    except OSError as error:
        if error.errno in _NO_FILE:
            return False
        raise


def walk_files(path: Path) -> list[Path]:
    """A file itself, or the files in a folder and those below it."""
    with wrap_os_errors("list", path):
        return sorted(below for below in path.rglob("*") if below.is_file()) if path.is_dir() else [path]


def list_subdirectories(path: Path) -> list[Path]:
    """The visible folders in a folder, by name; none where there is no such folder."""
    with wrap_os_errors("list", path):
        try:
            return sorted(entry for entry in path.iterdir() if not entry.name.startswith(".") and entry.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return []


def list_hidden_directories(path: Path) -> list[Path]:
    """The hidden folders in a folder; none where there is no such folder."""
    with wrap_os_errors("list", path):
        try:
            with os.scandir(path) as entries:
                return sorted(path / entry.name for entry in entries if entry.name.startswith(".") and entry.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return []


def host_name() -> str:
    """Equal in processes that share a page cache: the kernel's boot id where there is one, else the host's name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


def copy_file(source: Path, target: Path) -> None:
    """Copy a file to a name that is not there; not a sync."""
    with wrap_os_errors("copy", source), source.open("rb") as read, target.open("xb") as written:
        shutil.copyfileobj(read, written, 2**20)
