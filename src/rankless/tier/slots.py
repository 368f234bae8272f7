"""The slots of the local tier: files that this process maps, and that saves are staged into in turn.

Memory is reserved before the first byte is copied (:mod:`rankless.storage.mapped_file`). For example, the first slot of
a process is the file ``WRITER-00.data``.

A process needs three slots: one with a generation that is being drained, one with the newest complete generation, and
one for the save in progress. Slots are used again: fresh pages would cost more than the copy.

:class:`~rankless.tier.job.TierJob` has the slots of a process, each rank its own. A save takes one in the thread of the
caller; then the thread of the save takes slots for copies and parity (:mod:`rankless.tier.copies_on_hosts`,
:mod:`rankless.tier.parity`), in the background if the save is asynchronous. A load or a drain takes slots for computed
parts (:mod:`rankless.tier.rebuild`). So several threads call it. The table is removed before the first byte of a slot
is overwritten, and a pinned slot is never taken.

A save is drained only if no drain is in progress, which is why three suffice; one that is drained in any case may need
a fourth.
"""

from __future__ import annotations

import secrets
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rankless.storage.aligned_memory import Bytes
from rankless.storage.file_lock import FileLock
from rankless.storage.mapped_file import EMPTY, map_reserved
from rankless.storage.posix import wrap_os_errors
from rankless.tier.host_folder import DATA_SUFFIX, LOCK_SUFFIX, TierFolder
from rankless.tier.part_names import GenerationKey, parse_generation_name


@dataclass(eq=False)
class Slot:
    """A mapped file. ``table`` is the name of the table of its bytes, if that exists; ``pins`` counts its users."""

    path: Path
    memory: Bytes = field(default_factory=lambda: EMPTY)
    table: str = ""
    pins: int = 0


class Slots:
    """The slots of this process in the folder of a local tier. A forked process has none."""

    def __init__(self, folder: TierFolder) -> None:
        self._folder = folder
        self._lock, self._slots = threading.Lock(), list[Slot]()
        #: The slots of the newest generation with finished copies, and the slots of a newer one without copies.
        self._kept: Sequence[Slot] = ()
        self._kept_uncopied: Sequence[Slot] = ()
        self._writer, self._alive = _lock_new_writer(folder.path)
        weakref.finalize(self, self._alive.close)

    def take(self, nbytes: int) -> Slot:
        """Return a pinned slot of at least ``nbytes`` bytes. Its old bytes are not in the tier any more.

        Raises ``SpaceShortageError``.
        """
        with self._lock:
            idle = [slot for slot in self._slots if not slot.pins]
            slot = max(idle, key=lambda slot: (not slot.table, len(slot.memory) >= nbytes), default=None)
            if slot is None:
                slot = Slot(self._folder.path / f"{self._writer}-{len(self._slots):02d}{DATA_SUFFIX}")
                self._slots.append(slot)
            slot.pins = 1
        try:
            self._forget_content(slot)
            if len(slot.memory) < nbytes:
                held, slot.memory = len(slot.memory), EMPTY
                slot.memory = map_reserved(slot.path, nbytes, held)
        except BaseException:
            slot.pins = 0
            raise
        return slot

    def pin_generation(self, key: GenerationKey) -> list[Slot]:
        """Pin the slots with parts of a generation, and return them."""
        with self._lock:
            slots = [slot for slot in self._slots if parse_generation_name(slot.table) == key]
            for slot in slots:
                slot.pins += 1
        return slots

    def unpin(self, slot: Slot) -> None:
        """Undo the pin of :meth:`take`."""
        with self._lock:
            slot.pins -= 1

    def keep(self, slots: Sequence[Slot]) -> None:
        """Keep the parts of the newest generation, and no longer those that were kept before."""
        self.keep_uncopied(slots)
        with self._lock:
            for slot in self._kept:
                slot.pins -= 1
            self._kept, self._kept_uncopied = self._kept_uncopied, ()

    def keep_uncopied(self, slots: Sequence[Slot]) -> None:
        """Keep the parts of the newest generation, which has no copies, and of the newest one with copies."""
        with self._lock:
            for slot in slots:
                slot.pins += 1
            for slot in self._kept_uncopied:
                slot.pins -= 1
            self._kept_uncopied = slots

    @property
    def writer(self) -> str:
        """The beginning of the names of this process's files."""
        return self._writer

    def _forget_content(self, slot: Slot) -> None:
        """Remove the table of a slot's bytes, before the first of them is overwritten."""
        table, slot.table = slot.table, ""
        if table:
            self._folder.remove_table(table)


def _lock_new_writer(folder: Path) -> tuple[str, FileLock]:
    """Return a new name of a process, and its lock. Another process may look whether it is locked just before it is."""
    while True:
        writer = secrets.token_hex(8)
        with wrap_os_errors("lock", folder), suppress(BlockingIOError):
            return writer, FileLock(folder / f"{writer}{LOCK_SUFFIX}")
