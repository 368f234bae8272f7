"""Functions for files on a local or shared POSIX file system: small files, names, durability.

They raise ``StorageError`` with the path instead of ``OSError``.

All packages that touch files of a file system call it, on any rank and in any thread. ``ENOENT`` must stay distinct
from all other errors: callers take only that for a missing file.
"""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import secrets
import shutil
import stat
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import takewhile
from os import PathLike
from pathlib import Path
from typing import BinaryIO

from rankless.errors import InvalidArgumentError, OutsideLinkError, RanklessError, StorageError, UnsafeNameError

#: The flag to open a directory with in order to look at it. With Linux's ``O_PATH`` it need not be readable.
_INSPECT = getattr(os, "O_PATH", os.O_RDONLY)

#: Linux's random id of this boot of the kernel.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

#: The errors of opening a path as a directory if it is none.
_NOT_DIRECTORY = {errno.ENOTDIR, errno.ELOOP}

#: Advice for errors with a text that does not say it.
_HINTS = {errno.EMFILE: ": raise the limit of this process (ulimit -n)"}

#: How a file is opened that may be a named pipe: without that flag, the call waits until a process writes into it.
_AT_ONCE = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK

#: The errors of ``stat`` if there is no file, or none that this process may access.
_NO_FILE = {errno.ENOENT, errno.EACCES, *_NOT_DIRECTORY}


class _WrappedErrors(AbstractContextManager[None]):
    """See :func:`wrap_os_errors`.

    It is no generator: the frame of a generator that has raised keeps the frames of its callers in a cycle, with
    Python 3.13, and so the memory of a save, until the garbage collector runs.
    """

    def __init__(self, action: str, path: object) -> None:
        self._action, self._path = action, path

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not isinstance(error, OSError) or isinstance(error, RanklessError):
            return
        # A file that another host has removed is missing, also for an NFS client that has it open.
        number = errno.ENOENT if error.errno == errno.ESTALE else error.errno
        reason = f"{os.strerror(error.errno or 0)}{_HINTS.get(error.errno or 0, '')}"
        raise StorageError(number, f"could not {self._action} {self._path}: {reason}") from error


def wrap_os_errors(action: str, path: object) -> AbstractContextManager[None]:
    """Turn an ``OSError`` of the block into a ``StorageError`` that names the failed action and the path."""
    return _WrappedErrors(action, path)


class _StaleAsMissing(AbstractContextManager[None]):
    """Raises ``FileNotFoundError`` instead of ``ESTALE``."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, OSError) and error.errno == errno.ESTALE:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from error


def local_path(path: str | PathLike[str]) -> Path:
    """Return an absolute path.

    Raises ``InvalidArgumentError`` for the URL of an object store, for a text that no file can have as its path, for
    ``~``, which only a shell expands, and for a value that is neither a text nor a path.
    """
    if not isinstance(path, str | PathLike):
        raise InvalidArgumentError(f"a path must be a text or an os.PathLike; got {path!r:.80}")
    if path == "":
        raise InvalidArgumentError('the path is empty: pass "." for the current folder')
    if "://" in str(path):
        raise InvalidArgumentError(
            f"{path} is not a path of a file system; object stores are not supported here: use a local or shared folder"
        )
    if str(path).partition("/")[0] == "~":
        raise InvalidArgumentError(f"Python does not expand '~' in {path}: pass os.path.expanduser({str(path)!r})")
    try:
        is_possible = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        is_possible = False
    if not is_possible:
        raise InvalidArgumentError(f"{str(path)!r} cannot be a path: it has a NUL or a lone surrogate")
    return Path(path).absolute()


def make_directory(path: Path) -> None:
    """Create a directory and its parents; existing ones are no error."""
    with wrap_os_errors("create the folder", path):
        path.mkdir(parents=True, exist_ok=True)


def make_private_directory(path: Path) -> None:
    """Create a directory that only this user may enter. Raises ``StorageError`` if another thing has the name."""
    with wrap_os_errors("create the folder", path):
        with suppress(FileExistsError):
            path.mkdir(mode=0o700, parents=True)
        found = path.lstat()
    is_private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    if not is_private:
        raise StorageError(
            errno.EACCES, f"{path} is not a folder that only this user may enter: it needs this owner and the mode 0700"
        )


def make_empty_directory(path: Path) -> None:
    """Create a directory. Raises ``StorageError`` if it exists and is not empty.

    A client of NFS may report that it exists although the client itself has created it.
    """
    with wrap_os_errors("create the folder", path):
        try:
            path.mkdir()
        except FileExistsError:
            if not path.is_dir() or list_names(path):
                raise


def make_durable_directory(path: Path) -> None:
    """Create a directory and its parents, and make the names of the new ones durable."""
    with wrap_os_errors("inspect", path):
        missing = list(takewhile(lambda folder: not folder.exists(), (path, *path.parents)))
    make_directory(path)
    for folder in missing:
        fsync_directory(folder.parent)


def make_parents(root: Path, name: str) -> None:
    """Create the parent directories of file ``name`` below ``root``, but not ``root`` itself."""
    with wrap_os_errors("create the folders of", root / name):
        for folder in reversed(Path(name).parents[:-1]):
            (root / folder).mkdir(exist_ok=True)


def write_small(path: Path, data: bytes | memoryview) -> None:
    """Write a new small file and make its bytes durable."""
    with new_file(path) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def overwrite_small(path: Path, data: bytes) -> None:
    """Overwrite a small file in place, which takes no more space if it does not grow."""
    with wrap_os_errors("write", path), path.open("r+b") as file:
        file.write(data)
        file.truncate()


def write_fully(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all bytes at an offset of an open file. Raises ``OSError`` if the file takes no more."""
    view, done = memoryview(data), 0
    while done < len(view):
        written = os.pwrite(fd, view[done:], offset + done)
        if not written:
            raise OSError(errno.EIO, "no bytes were written")
        done += written


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Create a file to be written from its start. Its bytes are not durable at the end."""
    with wrap_os_errors("write", path), path.open("xb") as file:
        yield file


def allocate_space(path: Path, size: int) -> None:
    """Create a new file of ``size`` bytes, so that several processes can write into any part of it."""
    with wrap_os_errors("create", path):
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        try:
            os.ftruncate(fd, size)
        finally:
            os.close(fd)


@contextmanager
def open_to_read(path: Path) -> Iterator[int]:
    """Open a file, and yield its descriptor."""
    with wrap_os_errors("open", path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        with suppress(OSError):  # nothing was written
            os.close(fd)


def make_and_remove_file(path: Path) -> None:
    """Create an empty file, and remove it again. Raises ``StorageError`` if its folder takes no new file."""
    with wrap_os_errors("write into", path.parent):
        path.touch(mode=0o600, exist_ok=False)
        path.unlink()


def remove_file(path: Path) -> None:
    """Remove a file."""
    with wrap_os_errors("remove", path):
        path.unlink()


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fsync_path(path, os.O_DIRECTORY)


def sync_tree(path: Path) -> None:
    """Make a file, or a directory and its contents, durable, except its own name in its parent.

    Links, pipes and sockets have no bytes, so the sync of their directory is enough. To open them may fail, or wait.
    """
    with wrap_os_errors("list", path):
        entries = list(_walk_real(path)) if path.is_dir() else []
    for entry in reversed(entries):
        try:
            fsync_path(entry)
        except StorageError as error:
            if error.errno != errno.EACCES:  # else it is a file of a user that this process has not written
                raise
    fsync_path(path)


def _walk_real(folder: Path) -> Iterator[Path]:
    """Yield the regular files and the directories below a directory, each directory before its contents."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            is_directory = entry.is_dir(follow_symlinks=False)
            if is_directory or entry.is_file(follow_symlinks=False):
                yield folder / entry.name
            if is_directory:
                yield from _walk_real(folder / entry.name)


def start_writeback(fd: int) -> None:
    """Let the kernel begin to write the bytes of a file to its disk, if the system can: a later sync waits less."""
    if hasattr(os, "posix_fadvise"):
        # Linux starts the writeback of dirty pages at this advice, and drops the pages that are clean already. A file
        # system may refuse advice; the later sync reports errors of the writeback.
        with suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def fsync_path(path: Path, flags: int = 0) -> None:
    """Make the bytes of a file, or the names in a directory, durable. ``flags`` are more flags of ``os.open``."""
    with wrap_os_errors("sync", path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def check_regular(path: Path, *, within: tuple[Path, ...]) -> None:
    """Raise ``UnsafeNameError`` unless the path is a regular file that is really inside one of the directories."""
    with wrap_os_errors("inspect", path):
        if _is_file_without_links(path, within):
            return
        real = Path(os.path.realpath(path, strict=True))
        if not any(real.is_relative_to(folder.resolve()) for folder in within):
            raise OutsideLinkError(f"{path} is a link to {real}, outside of the checkpoint: refused")
        if not stat.S_ISREG(real.stat().st_mode):
            raise UnsafeNameError(f"{path} is not a regular file: refused")


def _is_file_without_links(path: Path, within: tuple[Path, ...]) -> bool:
    """Return whether a path is a regular file, with no link between it and one of the directories.

    This takes two or three calls, and to follow all links of the path and of the directories ten or more.
    """
    if ".." in path.parts or not stat.S_ISREG(os.lstat(path).st_mode):
        return False
    for parent in path.parents:
        if parent in within:
            return True
        if stat.S_ISLNK(os.lstat(parent).st_mode):
            return False
    return False


def real_path(path: Path) -> Path:
    """Return a path with all links followed. Missing components stay as they are."""
    with wrap_os_errors("inspect", path):
        return Path(os.path.realpath(path))


def read_small(path: Path, limit: int = 2**30) -> bytes:
    """Return all bytes of a small file.

    Raises ``StorageError`` if it has more than ``limit``, or is none, such as a named pipe, which would block.
    """
    with wrap_os_errors("read", path):
        descriptor = os.open(path, _AT_ONCE)
        try:
            file = os.fdopen(descriptor, "rb")
        except OSError:  # it is a directory: then the descriptor stays open
            os.close(descriptor)
            raise
        with file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise StorageError(errno.EINVAL, f"could not read {path}: it is not a regular file. Move it elsewhere")
            if status.st_size > limit:
                raise OSError(errno.EFBIG, f"{path} has more than {limit} bytes")
            return file.read()


def file_size(path: Path) -> int:
    """Return a file's size in bytes."""
    with wrap_os_errors("read", path):
        return path.stat().st_size


def file_version(path: Path) -> str:
    """Return a text that another file at this path, or other bytes of this one, would change; empty if missing."""
    try:
        with wrap_os_errors("inspect", path):
            return describe_version(path.stat())
    except StorageError as error:
        if error.errno in {errno.ENOENT, errno.ENOTDIR}:
            return ""
        raise


def describe_version(stat: os.stat_result) -> str:
    """Return the size and the times of the last change of the bytes, and of the file.

    The first time can be set by anybody, and is by ``rsync -t``, the second is the kernel's. Not the inode: a bucket
    that is mounted as a folder may give a file another one at each look.
    """
    return f"{stat.st_size}-{stat.st_mtime_ns}-{stat.st_ctime_ns}"


def list_regular_files(path: Path) -> set[str]:
    """List the names of the regular files in a directory, read in one pass; none if it is missing."""
    with wrap_os_errors("list", path):
        try:
            with _StaleAsMissing(), os.scandir(path) as entries:
                return {entry.name for entry in entries if entry.is_file(follow_symlinks=False)}
        except (FileNotFoundError, NotADirectoryError):
            return set()


def directory_identity(path: Path) -> str:
    """Return the device and the inode of a directory, as text."""
    with wrap_os_errors("inspect", path):
        status = path.stat()
    return f"{status.st_dev} {status.st_ino}"


def identify(path: Path) -> tuple[int, int, int] | None:
    """Return values of a path itself that a rename keeps; ``None`` if it does not exist.

    The number of a removed inode may be used again, its time will not.
    """
    with wrap_os_errors("inspect", path):
        try:
            with _StaleAsMissing():
                status = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def list_writable_mappings() -> set[int]:
    """Return the inodes of the files that this process has mapped so that writes to memory change them.

    Only Linux tells it.
    """
    inodes = set[int]()
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:  # noqa: PTH123
        for line in maps:
            _, permissions, _, _, inode, *_ = line.split(maxsplit=5)
            if permissions[1] == "w" and permissions[3] == "s" and inode != "0":
                inodes.add(int(inode))
    return inodes


def disk_usage(path: Path) -> tuple[float, int] | None:
    """Return a directory's modification time in seconds since 1970, and the bytes of the disk that its files use.

    Return ``None`` if it is missing.
    """
    with wrap_os_errors("inspect", path):
        try:
            with _StaleAsMissing():
                return path.stat().st_mtime, sum(file.lstat().st_blocks * 512 for file in path.rglob("*"))
        except FileNotFoundError:
            return None


def free_bytes(folder: Path) -> int | None:
    """Return the bytes that a directory's file system has free for this user; ``None`` if it does not say."""
    with wrap_os_errors("inspect", folder):
        status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize if status.f_blocks else None


def check_space(folder: Path, nbytes: int) -> None:
    """Raise ``StorageError`` if a directory's file system has fewer bytes free for this user than ``nbytes``."""
    if (free := free_bytes(folder)) is not None and free < nbytes:
        raise StorageError(
            errno.ENOSPC,
            f"{folder} has {free:,} bytes free, and the checkpoint needs {nbytes:,}; nothing was written",
        )


def last_change_time(path: Path) -> float:
    """Return the last modification time of a directory and its contents, in seconds since 1970.

    Raises ``StorageError`` if it is missing.
    """
    with wrap_os_errors("inspect", path):
        return max(entry.lstat().st_mtime for entry in (path, *path.rglob("*")))


def seconds_unchanged(folder: Path) -> float:
    """Return for how long nothing in a directory has changed, by the clock of its file system; 0 if it is missing."""
    try:
        changed = last_change_time(folder)
    except StorageError:
        return 0.0
    probe = folder.parent / f".{secrets.token_hex(8)}"
    with new_file(probe):
        pass
    try:
        return last_change_time(probe) - changed
    finally:
        remove_file(probe)


def remove_if_empty(folder: Path) -> None:
    """Remove a directory unless something is in it; a missing one is no error."""
    with wrap_os_errors("remove", folder), suppress(FileNotFoundError, NotADirectoryError):
        try:
            folder.rmdir()
        except OSError as error:
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                raise


def tree_state(path: Path) -> str:
    """Return a digest of the names, inodes, sizes and times of the files in a directory; ``""`` if it is missing."""
    with wrap_os_errors("inspect", path):
        try:
            with _StaleAsMissing():
                status_by_name = [(str(file.relative_to(path)), file.stat()) for file in sorted(path.rglob("*"))]
        except FileNotFoundError:
            return ""
    identities = [
        (name, status.st_ino, status.st_size, status.st_mtime_ns)
        for name, status in status_by_name
        if stat.S_ISREG(status.st_mode)
    ]
    return hashlib.blake2b(repr(identities).encode(), digest_size=16).hexdigest() if identities else ""


def path_exists(path: Path) -> bool:
    """Return whether the path exists."""
    with wrap_os_errors("inspect", path):
        try:
            with _StaleAsMissing():
                return path.exists()
        except FileNotFoundError:
            return False


def is_directory(path: Path) -> bool:
    """Return whether the path is a directory."""
    with wrap_os_errors("inspect", path):
        return path.is_dir()


def is_mounted(path: Path) -> bool:
    """Return whether the path is where a file system is mounted."""
    with wrap_os_errors("inspect", path):
        return path.is_mount()


def is_link(path: Path) -> bool:
    """Return whether the path is a symbolic link."""
    with wrap_os_errors("inspect", path):
        return path.is_symlink()


def is_file(path: Path) -> bool:
    """Return whether the path is a regular file; ``False`` if this process has no access to it."""
    with wrap_os_errors("inspect", path):
        try:
            return path.is_file()
        except PermissionError:
            return False


def file_exists(path: Path) -> bool:
    """Return whether the path exists and is not a directory.

    A special file such as a FIFO counts, so that a reader that opens it refuses it by name.
    """
    with wrap_os_errors("inspect", path):
        try:
            return path.exists() and not path.is_dir()
        except PermissionError:
            return False


def list_files(path: Path) -> list[Path]:
    """List the entries of a directory that are not directories, hidden ones too; none if it is missing.

    Special files such as FIFOs are included, so that a reader that opens one refuses it by name.
    """
    with wrap_os_errors("list", path):
        try:
            with _StaleAsMissing():
                return sorted(entry for entry in path.iterdir() if not entry.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return []


def list_names(path: Path) -> set[str]:
    """List the names in a directory, read in one pass; none if it is missing."""
    with wrap_os_errors("list", path):
        try:
            with _StaleAsMissing(), os.scandir(path) as entries:
                return {entry.name for entry in entries}
        except (FileNotFoundError, NotADirectoryError):
            return set()


def is_directory_without(path: Path, name: str) -> bool:
    """Return whether ``path`` exists but does not contain the file ``name``; ``False`` if it is missing.

    All checks use one directory descriptor, so that a concurrent rename cannot mix two directories.
    """
    with wrap_os_errors("inspect", path):
        try:
            with _StaleAsMissing():
                folder = os.open(path, _INSPECT | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return path.is_symlink()
        except OSError as error:
            if error.errno in _NOT_DIRECTORY:
                return True
            raise
        try:
            with _StaleAsMissing():
                return not _has_file(folder, name) and os.path.samestat(os.fstat(folder), path.stat())
        except FileNotFoundError:
            return False
        finally:
            os.close(folder)


def _has_file(folder: int, name: str) -> bool:
    """Return whether a directory contains a file. One that this process may not search has none.

    Raises ``PermissionError`` if the directory may be searched by its permissions, and the file system refuses it.
    """
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=folder).st_mode)
    except OSError as error:
        if error.errno not in _NO_FILE or (error.errno == errno.EACCES and os.access(".", os.X_OK, dir_fd=folder)):
            raise
        return False


def walk_files(path: Path) -> list[Path]:
    """Return the path itself if it is a file, or all files in a directory and below it."""
    with wrap_os_errors("list", path):
        return sorted(entry for entry in path.rglob("*") if entry.is_file()) if path.is_dir() else [path]


def iterate_files(folder: Path) -> Iterator[Path]:
    """Yield all but directories in a directory and below it, entries near the top first. Links are not followed."""
    folders = deque([folder])
    while folders:
        folder, found = folders.popleft(), []
        with wrap_os_errors("list", folder), suppress(FileNotFoundError), os.scandir(folder) as entries:
            found = [(Path(entry.path), entry.is_dir(follow_symlinks=False)) for entry in entries]
        folders += [path for path, is_folder in found if is_folder]
        yield from (path for path, is_folder in found if not is_folder)


def list_subdirectories(path: Path) -> list[Path]:
    """List the visible subdirectories of a directory, by name; none if it is missing."""
    with wrap_os_errors("list", path):
        try:
            return sorted(entry for entry in path.iterdir() if not entry.name.startswith(".") and entry.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return []


def list_hidden_directories(path: Path) -> list[Path]:
    """List the hidden subdirectories of a directory; none if it is missing."""
    with wrap_os_errors("list", path):
        try:
            with _StaleAsMissing(), os.scandir(path) as entries:
                hidden = [entry for entry in entries if entry.name.startswith(".")]
                return sorted(path / entry.name for entry in hidden if entry.is_dir(follow_symlinks=False))
        except (FileNotFoundError, NotADirectoryError):
            return []


def host_id() -> str:
    """Return an id that is equal in processes that share a page cache.

    It is the kernel's boot id if there is one, else the host's name. The run directory is not looked at: a client of a
    network file system would remember that it is missing, for up to 30 seconds after rank 0 has created it.
    """
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


def host_name() -> str:
    """Return the name of the host, for people to read, in printable ASCII. Several hosts may have the same.

    For example, ``node-1``.
    """
    return "".join(character if "!" <= character <= "~" else "?" for character in platform.node())


def copy_file(source: Path, target: Path) -> None:
    """Copy a file to a new name, without a sync."""
    with wrap_os_errors("copy", source), source.open("rb") as read, target.open("xb") as written:
        shutil.copyfileobj(read, written, 2**20)


def remove_empty_directory(path: Path) -> None:
    """Remove a directory. Raises ``StorageError`` if it is not empty, or missing."""
    with wrap_os_errors("remove", path):
        path.rmdir()
