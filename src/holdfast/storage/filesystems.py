"""Kinds of file systems, by their magic number from ``statfs``."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path

from holdfast.errors import StorageError
from holdfast.storage.posix import list_names, wrap_os_errors

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

#: The magic number of all versions of NFS.
_NFS = 0x6969

#: More bytes than ``struct statfs`` has on any machine. Its first member, a ``long``, is the magic number.
_STATFS_BYTES = 512


def filesystem_magic(path: Path) -> int:
    """Return the magic number of the file system that a directory is on; 0 where ``statfs`` reports none."""
    if sys.platform != "linux":
        return 0
    libc, buffer = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(_STATFS_BYTES)
    with wrap_os_errors("inspect", path):
        if libc.statfs(os.fsencode(path), buffer):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))
    return ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF


def is_local(path: Path) -> bool:
    """Return whether the kind of a directory's file system is known to belong to one host only."""
    return filesystem_magic(path) in _LOCAL


def forget_names(path: Path) -> None:
    """Make this host ask the file server what the names in a directory stand for.

    A client of a network file system remembers names for up to half a minute: which ones were missing, and which file
    or directory had the others. It asks again if the directory is listed.
    """
    with suppress(StorageError):  # there is no such directory
        if not is_local(path):
            list_names(path)


def shares_locks(path: Path) -> bool | None:
    """Return whether all hosts that use a directory's file system see each other's locks of files; ``None`` if unknown.

    An NFS client sends them to the server, unless it was mounted with ``nolock`` or ``local_lock=all``. Others may do
    so too, but depend on options that are not visible here.
    """
    magic = filesystem_magic(path)
    if magic in _LOCAL:
        return True
    options = _mount_options(path) if magic == _NFS else []
    return "local_lock=all" not in options if options else None


def _mount_options(path: Path) -> list[str]:
    """Return the options of the file system that a directory is on; none if they are unknown."""
    with wrap_os_errors("inspect", path):
        number = path.stat().st_dev
        device = f"{os.major(number)}:{os.minor(number)}"
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            fields = line.split()
            if fields[2] == device:
                return fields[-1].split(",")
    return []
