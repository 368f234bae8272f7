"""Kinds of file systems, by their magic number from ``statfs``."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from holdfast.storage.posix import wrap_os_errors

#: File systems of one host: all its processes see each lock and each byte (<linux/magic.h>).
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
