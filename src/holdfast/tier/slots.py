"""The slots of the local tier: files that this process maps, and that saves are staged into in turn.

Memory is *reserved* before the first byte is copied: a store into a mapped file without reserved pages would kill the
process (``SIGBUS``) if the file system or the memory cgroup were full.

A process needs three slots: one whose generation is being drained, one with the newest complete generation, and one for
the save in progress. Slots are used again: fresh pages would cost more than the copy.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from holdfast.errors import StorageError
from holdfast.storage.cgroup_memory import free_cgroup_bytes
from holdfast.storage.file_lock import FileLock
from holdfast.storage.memory import Bytes
from holdfast.storage.posix import wrap_os_errors
from holdfast.tier.folder import DATA_SUFFIX, LOCK_SUFFIX, TierFolder
from holdfast.tier.part import PartName

_EMPTY: Bytes = np.empty(0, np.uint8)

#: The errors of a reservation if there is not enough memory.
_FULL = {errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG}


class TierFullError(StorageError):
    """A host has not enough memory for a generation. ``needed`` and ``free`` are in bytes."""

    def __init__(self, folder: Path, needed: int, free: int) -> None:
        super().__init__(errno.ENOSPC, f"{folder} needs {needed:,} more bytes, and {free:,} are free")
        self.needed, self.free = needed, free


@dataclass(eq=False)
class Slot:
    """A mapped file. ``part`` is the part that it holds, whose table exists; ``pins`` counts who needs it."""

    path: Path
    memory: Bytes = field(default_factory=lambda: _EMPTY)
    part: PartName | None = None
    pins: int = 0


class Slots:
    """The slots of this process in the folder of a local tier. A forked process has none."""

    def __init__(self, folder: TierFolder) -> None:
        self._folder = folder
        self._lock, self._slots = threading.Lock(), list[Slot]()
        self._kept: Sequence[Slot] = ()
        self._writer, self._alive = _lock_new_writer(folder.path)
        weakref.finalize(self, self._alive.close)

    def take(self, nbytes: int) -> Slot:
        """Return a pinned slot of at least ``nbytes`` bytes. The part that it held is not in the tier any more.

        Raises ``TierFullError``.
        """
        with self._lock:
            idle = [slot for slot in self._slots if not slot.pins]
            slot = max(idle, key=lambda slot: (slot.part is None, len(slot.memory) >= nbytes), default=None)
            if slot is None:
                slot = Slot(self._folder.path / f"{self._writer}-{len(self._slots):02d}{DATA_SUFFIX}")
                self._slots.append(slot)
            slot.pins = 1
        try:
            self._forget_part(slot)
            if len(slot.memory) < nbytes:
                self._enlarge(slot, nbytes)
        except BaseException:
            slot.pins = 0
            raise
        return slot

    def unpin(self, slot: Slot) -> None:
        """Undo the pin of :meth:`take`."""
        with self._lock:
            slot.pins -= 1

    def keep(self, slots: Sequence[Slot]) -> None:
        """Keep the parts of the newest generation, and no longer those that were kept before."""
        with self._lock:
            for slot in slots:
                slot.pins += 1
            for slot in self._kept:
                slot.pins -= 1
            self._kept = slots

    @property
    def writer(self) -> str:
        """The beginning of the names of this process's files."""
        return self._writer

    def _forget_part(self, slot: Slot) -> None:
        """Remove the table of a part before its first byte is overwritten."""
        part, slot.part = slot.part, None
        if part is not None:
            self._folder.remove_part(part)

    def _enlarge(self, slot: Slot, nbytes: int) -> None:
        held, slot.memory = len(slot.memory), _EMPTY
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._check_free(size - held)
        with wrap_os_errors("create", slot.path):
            fd = os.open(slot.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                self._reserve(fd, size, held)
                slot.memory = np.frombuffer(mmap.mmap(fd, size), np.uint8)
            finally:
                os.close(fd)

    def _reserve(self, fd: int, size: int, held: int) -> None:
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(fd, held)  # not less: another process may have mapped it
            if error.errno not in _FULL:
                raise
            raise TierFullError(self._folder.path, size - held, self._count_free()) from error

    def _check_free(self, needed: int) -> None:
        if needed > (free := self._count_free()):
            raise TierFullError(self._folder.path, needed, free)

    def _count_free(self) -> int:
        """Return the bytes that the file system and the memory cgroup of this process have left."""
        with wrap_os_errors("inspect", self._folder.path):
            status = os.statvfs(self._folder.path)
        free = status.f_bavail * status.f_frsize
        in_cgroup = free_cgroup_bytes()
        return free if in_cgroup is None else min(free, in_cgroup)


def _lock_new_writer(folder: Path) -> tuple[str, FileLock]:
    """Return a new name of a process, and its lock. Another process may look whether it is locked just before it is."""
    while True:
        writer = secrets.token_hex(8)
        with wrap_os_errors("lock", folder), suppress(BlockingIOError):
            return writer, FileLock(folder / f"{writer}{LOCK_SUFFIX}")


def map_part(path: Path, nbytes: int) -> Bytes:
    """Map the bytes of a part of another process for reading. Raises ``StorageError``."""
    if not nbytes:
        return _EMPTY
    with wrap_os_errors("open", path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)  # a FIFO would block
        try:
            if os.fstat(fd).st_size < nbytes:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            # A private mapping: torch wants writable memory, and nothing is written to it.
            return np.frombuffer(mmap.mmap(fd, nbytes, access=mmap.ACCESS_COPY), np.uint8)
        finally:
            os.close(fd)
