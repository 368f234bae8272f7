"""Whole folders: renamed in one atomic step, exchanged, removed, locked; and the space there is for them."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast.errors import StorageError, TagExistsError
from holdfast.storage.fork_safety import ClosedInForks
from holdfast.storage.posix import fsync_directory, make_directory, wrap_os_errors

_NOREPLACE, _EXCHANGE = 1, 2
_AT_FDCWD = -100

#: What a rename fails with where the name is taken.
_TAKEN = {errno.EEXIST, errno.ENOTEMPTY}

#: How often a folder is made again that others take for a dead save's, and the seconds between.
_CLAIMS, _NAP = 100, 0.005

#: What ``renameat2`` fails with where the file system does not know how.
_UNABLE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}


class DirectoryLock(ClosedInForks):
    """A folder that a living process works on. Its end, however it comes, lets go of the folder.

    Where the file system has no locks (``held`` is false then), nobody can tell, and others leave the folder alone.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ``BlockingIOError`` where another process has the folder, or has removed it."""
        super().__init__()
        self._fd, self.held = -1, False
        self._fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.held = _lock(self._fd)
            _check_there(folder, self._fd)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unlock the folder: also if a process that was forked meanwhile has it open. Closes it once."""
        if self.held:
            with suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        self.close_in_fork()

    def close_in_fork(self) -> None:
        """Close the folder, and leave the lock to the process that has it."""
        fd, self._fd, self.held = self._fd, -1, False
        if fd >= 0:
            with suppress(OSError):  # nothing was written, and it is closed all the same
                os.close(fd)


def _check_there(folder: Path, fd: int) -> None:
    """Who had the lock before may have removed the folder."""
    if not folder.exists() or folder.stat().st_ino != os.fstat(fd).st_ino:
        raise BlockingIOError(errno.EWOULDBLOCK, "the folder was removed meanwhile")


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def create_locked(folder: Path) -> DirectoryLock:
    """Make a folder and lock it. Between the two, others may take it for a dead save's, and remove it."""
    for _ in range(_CLAIMS):
        make_directory(folder)
        with wrap_os_errors("lock", folder), suppress(BlockingIOError, FileNotFoundError):
            return DirectoryLock(folder)
        time.sleep(_NAP)
    raise StorageError(errno.EBUSY, f"{folder} was removed again and again while it was made")


def rename_noreplace(partial: Path, final: Path) -> None:
    """Give a finished folder its final name in one atomic step, and make that durable.

    Raises ``TagExistsError`` where the name is taken.
    """
    with wrap_os_errors("rename to its final name", partial), _free(final):
        if not _renameat2(partial, final, _NOREPLACE):
            _rename_new(partial, final)
    fsync_directory(final.parent)


@contextmanager
def _free(final: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
        raise TagExistsError(f"{final} appeared while this checkpoint was being saved; it was left as it is") from None


def exchange_directories(partial: Path, final: Path, aside: Path) -> None:
    """Give a finished folder a name that is taken; the folder that had it is ``aside`` afterwards. Made durable.

    In one atomic step where the file system can exchange names, else in two: between them neither has the name, and
    ``aside`` tells what was there. Where the second step fails, the first is taken back. Raises ``TagExistsError``
    where another folder gets the name between them: what was there before stays aside then.
    """
    with wrap_os_errors("rename to its final name", partial), _free(final):
        if _renameat2(partial, final, _EXCHANGE):
            with suppress(OSError):  # it is done; what is aside goes, whatever its name
                partial.rename(aside)
        else:
            fsync_directory(final.parent)  # who finds the old one aside looks for the one that waits
            final.rename(aside)
            try:
                fsync_directory(final.parent)
                partial.rename(final)
            except BaseException:
                with suppress(OSError):  # where another has the name, or it cannot be told, it stays aside
                    _rename_new(aside, final)
                raise
    fsync_directory(final.parent)


def replace_file(partial: Path, final: Path) -> None:
    """Give a finished file its final name in one atomic step, whatever file had it before. Made durable."""
    with wrap_os_errors("rename to its final name", partial):
        partial.replace(final)
    fsync_directory(final.parent)


def link_remaining(source: Path, target: Path, gone: set[str]) -> None:
    """Put what is in one folder into another, too, but for the names in ``gone`` and those that are there already.

    Files are linked, so that they are not copied; where the file system has no links, they are.
    """
    with wrap_os_errors("take over the contents of", source):
        for entry in sorted(source.iterdir()):
            if entry.name not in gone and not (target / entry.name).exists():
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


def rename_path(source: Path, target: Path) -> None:
    """Rename a folder, and make that durable."""
    with wrap_os_errors("rename", source):
        source.rename(target)
    fsync_directory(target.parent)


def remove_directory(path: Path, hidden: Path) -> None:
    """Remove a folder that others may read: at first it changes its name, so that nobody sees half of it."""
    rename_path(path, hidden)
    remove_tree(hidden)


def _renameat2(source: Path, target: Path, flags: int) -> bool:
    """Whether it was done; ``False`` where the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNABLE:
        return False
    raise OSError(code, os.strerror(code), str(target))


def _rename_new(source: Path, target: Path) -> None:
    # rename() itself refuses a folder that is not empty, so an existing checkpoint is safe here too.
    if target.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    source.rename(target)


def remove_tree(path: Path) -> None:
    """Delete a folder and all in it, a file, or a link; what is already gone is fine."""
    with wrap_os_errors("remove", path):
        if path.is_symlink() or path.is_file():
            path.unlink(missing_ok=True)
            return
        shutil.rmtree(path, ignore_errors=False, onerror=_unless_gone)


def _unless_gone(_function: object, _path: object, info: tuple[type[BaseException], BaseException, object]) -> None:
    if not isinstance(info[1], FileNotFoundError):
        raise info[1]


def check_space(folder: Path, nbytes: int) -> None:
    """Raise ``StorageError`` where a folder's file system has less room for this user than ``nbytes``."""
    with wrap_os_errors("look at", folder):
        found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    if found.f_blocks and free < nbytes:
        raise StorageError(
            errno.ENOSPC,
            f"there are {free:,} bytes free for {folder}, and the checkpoint needs {nbytes:,}; nothing was written",
        )
