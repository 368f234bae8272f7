"""Kinds of file systems, by what ``statfs`` calls their magic number: what they promise to several hosts."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from holdfast.storage.posix import wrap_os_errors

#: Of one host alone: its locks are seen by all who use it, and so is every byte (<linux/magic.h>).
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

#: Of many hosts: they keep the caches of their clients coherent, down to the byte.
_COHERENT = {
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x00C36400: "CephFS",
    0x01161970: "GFS2",
    0x7461636F: "OCFS2",
}

#: Others that are met often, so that a message can call them by a name.
_OTHERS = {
    0x6969: "NFS",
    0x65735546: "FUSE",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB",
    0x01021997: "9p",
    0x19830326: "BeeGFS",
}

#: More bytes than ``struct statfs`` has on any machine; its first member, a ``long``, is the magic number.
_SIZE = 512


def filesystem_magic(path: Path) -> int:
    """The number of the kind of file system that a folder is on."""
    libc, buffer = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(_SIZE)
    with wrap_os_errors("look at", path):
        if libc.statfs(os.fsencode(path), buffer):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))
    return ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF


def is_local(path: Path) -> bool:
    """Whether a folder is on a file system of this host alone, as far as its kind tells."""
    return filesystem_magic(path) in _LOCAL


def is_coherent(path: Path) -> bool:
    """Whether hosts that write into one page of a file there are known to lose nothing of each other's."""
    return filesystem_magic(path) in _LOCAL.keys() | _COHERENT.keys()


def filesystem_kind(path: Path) -> str:
    """What the file system of a folder is called; its number, if that is not known here."""
    number = filesystem_magic(path)
    return (_LOCAL | _COHERENT | _OTHERS).get(number, f"of kind {number:#x}")
