"""A bounded file that several processes append lines to, each with one write.

A write to a file that was opened with ``O_APPEND`` goes to its end, also if another process has just written there: on
a local file system lines never mix. On NFS one may overwrite another, so readers must skip a line that is none of
theirs.

:class:`rankless.run.folder_run_store.FolderRunStore` keeps the journal of a run in one: rank 0 of jobs and ``rankless
prune`` append at any time, and any process reads.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from rankless.storage.posix import wrap_os_errors

#: The flags of an append. A pipe in the place of the file must not block, and a link must not lead elsewhere.
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

#: A value that is returned in place of a descriptor.
_MISSING, _FULL = -1, -2


def append_line(path: Path, line: bytes, *, limit: int, older: Path, create: bool) -> None:
    """Append a line, in one write. Nothing is made durable.

    If the file has ``limit`` bytes or more, it is renamed to ``older`` first, in place of the file there. A missing
    file is created if ``create`` is true; otherwise nothing is written. Each line begins with a line break, too, so
    a line that a crash has cut does not spoil the next one.
    """
    with wrap_os_errors("append to", path):
        fd = _open_to_append(path, limit, create=create)
        if fd == _FULL:
            path.replace(older)
            fd = _open_to_append(path, limit, create=True)
        if fd < 0:  # missing, or other processes have filled it again
            return
        try:
            os.write(fd, b"\n" + line + b"\n")
        finally:
            os.close(fd)


def _open_to_append(path: Path, limit: int, *, create: bool) -> int:
    """Open a regular file to append to. Return ``_FULL`` if it has ``limit`` bytes, ``_MISSING`` if it is missing."""
    try:
        fd = os.open(path, _APPEND | (os.O_CREAT if create else 0), 0o666)
    except FileNotFoundError:
        return _MISSING
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and status.st_size < limit:
        return fd
    os.close(fd)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return _FULL


def read_lines(path: Path, limit: int) -> list[bytes]:
    """Return the lines of a regular file, of at most its last ``limit`` bytes; none if it is missing or no file."""
    with wrap_os_errors("read", path):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
                return []
            raise
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return []
            with os.fdopen(fd, "rb", closefd=False) as file:
                file.seek(max(0, status.st_size - limit))
                return file.read(limit).splitlines()
        finally:
            os.close(fd)
