"""Atomic renames of files and directories, and exchanges of two directories. The new names are durable.

Commits (:mod:`rankless.run.pending_dir`), claims (:mod:`rankless.run.claims`), removals and small files use it, on rank
0 or in commands. Callers make files durable before they rename them; the new name must be durable when the call
returns. No look before a rename may take the place of ``RENAME_NOREPLACE``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rankless.errors import InvalidArgumentError, StorageError, TagExistsError
from rankless.storage.links_and_clones import DISK_ERRORS
from rankless.storage.posix import fsync_directory, identify, remove_file, wrap_os_errors, write_small

#: The most bytes of the name of a file before a suffix of a dot and 16 digits.
_LONGEST_NAME = 255 - 17

_NOREPLACE, _EXCHANGE = 1, 2
_AT_FDCWD = -100

#: The errors of a rename to a name that is taken.
_NAME_TAKEN = {errno.EEXIST, errno.ENOTEMPTY}

#: The errors of ``renameat2`` on a file system that does not support its flags.
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}

_libc = ctypes.CDLL(None, use_errno=True)


def rename_noreplace(pending: Path, final: Path) -> None:
    """Rename a finished directory to its final name in one atomic step, and make the new name durable.

    Raises ``TagExistsError`` if the name is taken.
    """
    with wrap_os_errors("rename to its final name", pending), _raising_tag_exists(final):
        if not _renameat2(pending, final, _NOREPLACE):
            _rename_new(pending, final)
    _sync_names(pending, final)


@contextmanager
def _raising_tag_exists(final: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _NAME_TAKEN:
            raise
        raise TagExistsError(f"{final} exists, and was left as it is: choose another name, or move it away") from None


def exchange_directories(pending: Path, final: Path, displaced: Path) -> None:
    """Replace the directory ``final`` by a finished one, and rename the old one to ``displaced``. Make both durable.

    This is one atomic step if the file system can exchange names. Else it takes two renames: between them no directory
    has the final name, and ``displaced`` says which one had it. If the second rename fails, the first is undone. Raises
    ``TagExistsError`` if another directory gets the name between the two; then the old one stays ``displaced``.
    """
    with wrap_os_errors("rename to its final name", pending), _raising_tag_exists(final):
        if _renameat2(pending, final, _EXCHANGE):
            with suppress(OSError):  # the exchange is done; the old directory is removed, whatever its name
                _rename(pending, displaced)
        else:
            fsync_directory(final.parent)  # a reader of the displaced one expects that the pending directory exists
            _rename(final, displaced)
            try:
                fsync_directory(final.parent)
                _rename(pending, final)
            except BaseException:
                with suppress(OSError):  # if the name is taken, or that is unknown, the old one stays displaced
                    _rename_new(displaced, final)
                raise
    _sync_names(pending, final)


def exchange_files(pending: Path, final: Path, displaced: Path) -> None:
    """Replace the file ``final`` by a finished one in one atomic step, and rename the old one to ``displaced``.

    On a file system that cannot exchange names the old one is removed by that: a reader must find a file at any time.
    """
    with wrap_os_errors("rename to its final name", pending):
        if _renameat2(pending, final, _EXCHANGE):
            with suppress(OSError):  # the exchange is done
                _rename(pending, displaced)
        else:
            _rename(pending, final)
    _sync_names(pending, final)


def replace_file(pending: Path, final: Path) -> None:
    """Rename a finished file to its final name in one atomic step, replacing any file there. Make it durable."""
    with wrap_os_errors("rename to its final name", pending):
        _rename(pending, final)
    _sync_names(pending, final)


def _shorten(name: str) -> str:
    """Return the beginning of a name that leaves room for a suffix: file systems have at most 255 bytes for a name."""
    return name.encode(errors="surrogateescape")[:_LONGEST_NAME].decode(errors="ignore")


def replace_small(path: Path, data: bytes) -> None:
    """Write a small file in one atomic step, in place of the one that is there, if any. Make it durable."""
    draft = path.with_name(f"{_shorten(path.name)}.{secrets.token_hex(8)}")
    try:
        write_small(draft, data)
        replace_file(draft, path)
    except BaseException:  # an interrupt, too, leaves no draft
        with suppress(StorageError):
            remove_file(draft)
        raise


def replace_output(path: Path, data: bytes) -> None:
    """Write a file that a user has named, in place of the regular file that is there, if any. Links are followed.

    Raises ``InvalidArgumentError`` if something else is there: a rename would remove a device such as ``/dev/null``.
    """
    with wrap_os_errors("write", path):
        target = path.resolve()
        if target.exists() and not target.is_file():
            raise InvalidArgumentError(f"{path} is not a regular file, and cannot be replaced: pass another name")
    replace_small(target, data)


def create_small(path: Path, data: bytes) -> bool:
    """Write a small file in one step, unless it exists. Return whether this call has created it. Make it durable.

    Of several processes that call it at a time, also on several hosts, one creates the file.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        write_small(draft, data)
        with wrap_os_errors("create", path):
            try:
                os.link(draft, path)  # servers of network file systems make links in one step, too
            except FileExistsError:
                return draft.samefile(path)  # the reply to the first attempt of a client was lost
            except OSError as error:
                if error.errno in DISK_ERRORS:
                    raise
                return _rename_if_new(draft, path)
        fsync_directory(path.parent)
        return True
    finally:
        with suppress(StorageError):
            remove_file(draft)


def _rename_if_new(draft: Path, path: Path) -> bool:
    try:
        rename_noreplace(draft, path)
    except TagExistsError:
        return False
    return True


def rename_path(source: Path, target: Path) -> None:
    """Rename a file or directory, and make the new name durable."""
    with wrap_os_errors("rename", source):
        _rename(source, target)
    _sync_names(source, target)


def _sync_names(source: Path, target: Path) -> None:
    """Make a rename durable: it changed the directories of both names."""
    fsync_directory(target.parent)
    if source.parent != target.parent:
        fsync_directory(source.parent)


def _renameat2(source: Path, target: Path, flags: int) -> bool:
    """Call ``renameat2``. Return whether it was done; ``False`` if the file system does not support ``flags``."""
    renameat2 = getattr(_libc, "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(target))


def _rename_new(source: Path, target: Path) -> None:
    # rename() refuses to replace a directory that is not empty, so an existing checkpoint is safe here too.
    if target.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    _rename(source, target)


def _rename(source: Path, target: Path) -> None:
    """Rename a path.

    After a restart of a file server its client sends a rename again if the reply was lost. The server reports that the
    source is missing then, although the rename is done.
    """
    identity = identify(source)
    try:
        source.rename(target)
    except FileNotFoundError:
        if not os.path.lexists(target) or identify(target) != identity:
            raise
