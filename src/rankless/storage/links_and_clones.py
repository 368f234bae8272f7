"""Files and ranges of bytes that several checkpoints share: hard links of files, and clones of ranges.

A shared file must never be written, so it is made read-only. No failure to share matters
to the caller, who writes the bytes instead, except that the disk fails or is full.

:mod:`rankless.save.base_files` links and clones on rank 0 in an incremental save: links in the vote on the preparation,
clones in the vote "finding unchanged bytes". Reports and ``rankless ls`` count the bytes that files share.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from rankless.errors import StorageError
from rankless.storage.posix import wrap_os_errors

#: The errors of a disk. All others mean that this file, or this file system, has no links or clones.
DISK_ERRORS = {errno.EIO, errno.ENOSPC, errno.EDQUOT}

#: The errors of file systems that never link, or never clone, files as a caller asks for.
_UNSUPPORTED = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.EXDEV}

#: Linux's ``ioctl`` that makes a range of a file share the blocks of another file, and its argument: the source's
#: descriptor, offset and length, and the destination's offset (<linux/fs.h>).
CLONE_RANGE, CLONE_ARGUMENT = 0x4020940D, struct.Struct("=qQQQ")

#: Linux's ``ioctl`` that reports the extents of a file, and the header of its argument: the range, flags, the number of
#: extents reported and the number of those that fit (<linux/fiemap.h>).
_FIEMAP, _FIEMAP_HEADER = 0xC020660B, struct.Struct("=QQIIII")

#: A reported extent: its offset in the file, on the disk, its length, and flags.
_EXTENT = struct.Struct("=QQQQQIIII")

#: The flags of an extent: the last one of the file, and one that other files share.
_LAST, _SHARED = 0x1, 0x2000

#: The extents that are reported at a time.
_EXTENTS = 512

#: Shorter ranges are not cloned: a clone costs about as much as the write of so many bytes.
MIN_CLONE_BYTES = 2**20

#: Clones make a file of ever more extents. One that has more is written anew.
_MAX_EXTENTS = 4096

#: A pipe in the place of a file must not block.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class FileIdentity(NamedTuple):
    """The identity of a file, and its version. It has no change time: each link and each removal changes that."""

    inode: int
    size: int
    mtime_ns: int


class Sharing:
    """The operations that the file system of a directory supports, as far as is known. A new object asks it again."""

    def __init__(self) -> None:
        self.links = self.clones = True
        self._has_tried = False

    def link_file(self, source: Path, target: Path, identity: FileIdentity) -> bool:
        """Create ``target`` as a hard link of ``source``, and make its bytes durable.

        Return false, and create nothing, if that is impossible, or if ``source`` is not the file with the ``identity``
        or has another owner than the directory of ``target``.
        """
        if not self.links:
            return False
        try:
            with _open_file(source) as fd:
                status, owner = os.fstat(fd), target.parent.stat().st_uid
                if not _is_file(status, identity) or status.st_uid != owner or not status.st_mode & stat.S_IRUSR:
                    return False
                os.fsync(fd)  # a copy of a checkpoint may not be durable
            os.link(source, target, follow_symlinks=False)
        except OSError as error:
            self.links = self.links and error.errno not in _UNSUPPORTED
            _raise_disk_error(error, target)
            return False
        return self._confirm_link(target, identity)

    def _confirm_link(self, target: Path, identity: FileIdentity) -> bool:
        """Return whether a new link is of the expected file, which may have been replaced meanwhile; else remove it."""
        with wrap_os_errors("inspect", target):
            if _is_file(target.lstat(), identity):
                return True
            target.unlink()
        return False

    def try_to_clone(self, source: Path, target: Path) -> None:
        """Find out, once, whether the file system clones: clone the first page of a file that is written anew then.

        Rank 0 of a save calls it. Where nothing can be cloned, later saves compare less.
        """
        if self._has_tried or not self.clones:
            return
        self._has_tried = True
        with suppress(OSError, StorageError), _open_file(source) as fd:
            identity = identify_file(source)
            if identity is not None:
                self.clone_ranges(fd, target, [(0, mmap.PAGESIZE)], identity)

    def clone_ranges(
        self, source: int, target: Path, ranges: Sequence[tuple[int, int]], identity: FileIdentity
    ) -> bool:
        """Make ranges of ``target`` share the blocks of an open file at the same offsets.

        The ranges begin and end at multiples of the page size. Return false if any of them is not cloned, or if the
        file has not the ``identity`` any more.
        """
        if not self.clones:
            return False
        try:
            fd = os.open(target, os.O_WRONLY | os.O_CLOEXEC)
            try:
                for start, stop in ranges:
                    fcntl.ioctl(fd, CLONE_RANGE, CLONE_ARGUMENT.pack(source, start, stop - start, start))
            finally:
                os.close(fd)
        except OSError as error:
            self.clones = error.errno not in _UNSUPPORTED
            _raise_disk_error(error, target)
            return False
        return _is_file(os.fstat(source), identity)


def identify_file(path: Path) -> FileIdentity | None:
    """Return the identity of a regular file; ``None`` if there is none. Raises ``StorageError``."""
    with wrap_os_errors("inspect", path):
        try:
            with _open_file(path) as fd:  # a client of NFS asks the server if a file is opened
                status = os.fstat(fd)
        except OSError as error:
            if error.errno in {errno.ENOENT, errno.ELOOP}:
                return None
            raise
    if not stat.S_ISREG(status.st_mode):
        return None
    return FileIdentity(status.st_ino, status.st_size, status.st_mtime_ns)


def count_extents(fd: int) -> int:
    """Return the number of extents of an open file; 0 if the file system does not report it."""
    argument = bytearray(_FIEMAP_HEADER.pack(0, 2**64 - 1, 0, 0, 0, 0))
    with suppress(OSError):
        fcntl.ioctl(fd, _FIEMAP, argument)
        return int(_FIEMAP_HEADER.unpack(argument)[3])
    return 0


def own_bytes(path: Path) -> int:
    """Return the disk space that only a file, or only a directory's files take: its removal would make it free.

    Other names of a file, and ranges that other files share, are recognized anywhere on the file system.
    """
    total = 0
    shared: int | None = 0
    for file in (path, *_walk(path)):
        with suppress(OSError):  # another process removes it
            status = file.lstat()
            if status.st_nlink != 1 or not stat.S_ISREG(status.st_mode):
                continue
            size = status.st_blocks * 512
            total += size
            if shared is not None and size >= MIN_CLONE_BYTES:
                shared = _count_shared_bytes(file)
                total -= min(size, shared or 0)
    return total


def _walk(path: Path) -> Iterator[Path]:
    """Yield the entries below a directory, as far as it can be listed: another process may remove it."""
    for folder, subfolders, files in os.walk(path):
        yield from (Path(folder, name) for name in (*subfolders, *files))


def _count_shared_bytes(path: Path) -> int | None:
    """Return how many bytes of a file are in extents that other files share; ``None`` if the file system has no map."""
    try:
        with _open_file(path) as fd:
            return sum(length for length, flags in _iter_extents(fd) if flags & _SHARED)
    except OSError as error:
        return None if error.errno in _UNSUPPORTED else 0


def _iter_extents(fd: int) -> Iterator[tuple[int, int]]:
    """Yield the length and the flags of each extent of an open file."""
    start = 0
    while True:
        argument = bytearray(_FIEMAP_HEADER.size + _EXTENTS * _EXTENT.size)
        _FIEMAP_HEADER.pack_into(argument, 0, start, 2**64 - 1 - start, 0, 0, _EXTENTS, 0)
        fcntl.ioctl(fd, _FIEMAP, argument)
        count, flags = _FIEMAP_HEADER.unpack_from(argument)[3], _LAST
        for number in range(count):
            offset, _, length, _, _, flags, *_ = _EXTENT.unpack_from(
                argument, _FIEMAP_HEADER.size + number * _EXTENT.size
            )
            yield length, flags
            start = offset + length
        if not count or flags & _LAST:
            return


def is_fragmented(fd: int) -> bool:
    """Return whether an open file has so many extents that no more of it should be cloned."""
    return count_extents(fd) > _MAX_EXTENTS


def make_read_only(path: Path) -> None:
    """Take the permission to write from a file, if this user owns it."""
    with suppress(OSError), _open_file(path) as fd:
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        if mode & 0o222:
            os.fchmod(fd, mode & ~0o222)


@contextmanager
def _open_file(path: Path) -> Iterator[int]:
    fd = os.open(path, _READ)
    try:
        yield fd
    finally:
        os.close(fd)


def _is_file(status: os.stat_result, identity: FileIdentity) -> bool:
    found = FileIdentity(status.st_ino, status.st_size, status.st_mtime_ns)
    return stat.S_ISREG(status.st_mode) and found == identity


def _raise_disk_error(error: OSError, path: Path) -> None:
    if error.errno in DISK_ERRORS:
        with wrap_os_errors("share", path):
            raise error
