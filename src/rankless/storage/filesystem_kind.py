"""Kinds of file systems, by their magic number from ``statfs``.

Saves, loads, locks and local tiers ask it on each rank for itself, mostly rank 0. In doubt a file system counts as
shared, and its locks as invisible.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from rankless.errors import StorageError
from rankless.storage.object_path import ObjectPath
from rankless.storage.posix import list_names, path_exists, wrap_os_errors

#: File systems of one host: all its processes see each lock. Other hosts can only use them through one of another kind,
#: such as NFS (<linux/magic.h>).
_LOCAL = {
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x794C7630: "overlay",
    0x2FC12FC1: "zfs",
    0xF2F52010: "f2fs",
    0xCA451A4E: "bcachefs",
}

#: File systems without a disk: their files are the page cache.
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})

#: The magic numbers of all versions of NFS, and of FUSE.
_NFS, _FUSE = 0x6969, 0x65735546

#: The scheme of the URLs of buckets, by the program that mounts them through FUSE; empty if it mounts several kinds.
_BUCKET_SCHEMES = {
    "mountpoint-s3": "s3",
    "s3fs": "s3",
    "goofys": "s3",
    "gcsfuse": "gs",
    "blobfuse": "az",
    "blobfuse2": "az",
    "rclone": "",
}

#: More bytes than ``struct statfs`` has on any machine. Its first member, a ``long``, is the magic number.
_Statfs = ctypes.c_char * 512

_libc = ctypes.CDLL(None, use_errno=True)


def filesystem_magic(path: Path) -> int:
    """Return the magic number of the file system that a file or a directory is on; 0 where ``statfs`` reports none."""
    if sys.platform != "linux":
        return 0
    buffer = _Statfs()
    with wrap_os_errors("inspect", path):
        if _libc.statfs(os.fsencode(path), buffer):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))
    return ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF


def is_local(path: Path) -> bool:
    """Return whether the kind of a directory's file system is known to belong to one host only."""
    if isinstance(path, ObjectPath):
        return False
    return filesystem_magic(path) in _LOCAL


def is_in_memory(path: Path) -> bool:
    """Return whether a file is on a file system without a disk."""
    return _LOCAL.get(filesystem_magic(path)) in _IN_MEMORY


def forget_names(path: Path) -> None:
    """Make this host ask the file server for the files behind the names in a directory.

    A client of a network file system remembers names for up to half a minute: which ones were missing, and which file
    or directory had the others. It asks again if the directory is listed.
    """
    if isinstance(path, ObjectPath):  # nothing is remembered
        return
    with suppress(StorageError):  # there is no such directory
        if not is_local(path):
            list_names(path)


def forget_missing(path: Path) -> None:
    """Make this host ask the file server for a directory that it takes for missing: see :func:`forget_names`."""
    for folder in reversed((path, *path.parents)):
        if not path_exists(folder):
            forget_names(folder.parent)


def shares_locks(path: Path) -> bool | None:
    """Return whether all hosts that use a directory's file system see each other's locks of files; ``None`` if unknown.

    An NFS client sends them to the server, unless it was mounted with ``nolock`` or ``local_lock=all``. Others may do
    so too, but depend on options that are not visible here.
    """
    magic = filesystem_magic(path)
    if magic in _LOCAL:
        return True
    mount = _find_mount(path) if magic == _NFS else None
    return None if mount is None else "local_lock=all" not in mount.options


class BucketMount(msgspec.Struct, frozen=True):
    """A bucket that a program has mounted through FUSE, and the scheme of its URL; empty if unknown."""

    program: str
    scheme: str


def find_bucket_mount(path: Path) -> BucketMount | None:
    """Return the mount of a bucket that a directory is on; ``None`` for another file system."""
    mount = _find_mount(path) if filesystem_magic(path) == _FUSE else None
    if mount is None:
        return None
    # Programs name themselves in the type, such as fuse.gcsfuse, or in the source.
    for program in (mount.type.removeprefix("fuse."), mount.source):
        if program in _BUCKET_SCHEMES:
            return BucketMount(program, _BUCKET_SCHEMES[program])
    return None


class Mount(msgspec.Struct, frozen=True):
    """A mounted file system: its type, its source, and the options of the file system."""

    type: str
    source: str
    options: Sequence[str]


def _find_mount(path: Path) -> Mount | None:
    """Return the mount that a directory is on; ``None`` if it is unknown."""
    with wrap_os_errors("inspect", path):
        number = path.stat().st_dev
        device = f"{os.major(number)}:{os.minor(number)}"
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            fields = line.split()
            if fields[2] == device:
                kind, source, options = fields[-3:]
                return Mount(kind, source, options.split(","))
    return None
