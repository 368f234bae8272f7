"""The publication of a checkpoint in an object store: its pointer, and the removals after it, or instead of it.

Rank 0 does all of it.

:mod:`rankless.save.object_output` publishes in the vote "completing the files", and removes after it, without a vote. A
pointer counts only if it was read back, is the highest, and its files are still there: the checks after its creation
must stay.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from rankless.errors import RanklessError, StorageError, TagExistsError
from rankless.observe.reporter import note_corrupt
from rankless.observe.spans import traced
from rankless.observe.warning import warn_or_log
from rankless.ondisk import manifest
from rankless.ondisk.manifest import Manifest
from rankless.run.cleanup import delete_checkpoints, expired_checkpoints
from rankless.run.corruption import CorruptRecord, set_aside_corrupt
from rankless.run.folder_names import checkpoint_folder
from rankless.run.history import KnownCheckpoint, is_newer
from rankless.run.object_removal import delete_replaced, discard_folder, find_damage, remove_pointers
from rankless.run.pointers import (
    Pointer,
    TagEntry,
    check_readable,
    find_bytes,
    find_highest_number,
    find_tag,
    is_pointer,
    pointer_path,
)
from rankless.run.retention import Retention
from rankless.storage.object_path import ObjectPath

#: How often a save tries to publish its checkpoint, and the seconds between.
_PUBLISH_ATTEMPTS, _PUBLISH_SECONDS = 100, 0.1


def _allow(*_: Manifest) -> None:
    """Raise nothing: nothing forbids the publication."""


@dataclass(frozen=True)
class PublicationChecks:
    """The checks right before a pointer is created, and right after it, of its checkpoint. Each raises an error.

    A request may hang for minutes, and another job may continue the run meanwhile.
    """

    before: Callable[[], None] = _allow
    after: Callable[[Manifest], None] = _allow


#: Nothing forbids the publication.
UNCHECKED = PublicationChecks()


class ObjectPublication:
    """The publication of one folder under a tag. ``folder_id`` is that in the name of the folder."""

    def __init__(self, run: ObjectPath, tag: str, folder_id: str, checks: PublicationChecks = UNCHECKED) -> None:
        self._run, self._tag, self._checks = run, tag, checks
        self.folder_id = folder_id
        #: The pointer that was replaced, and the numbers of the pointers to this folder that may exist.
        self._replaced: TagEntry | None = None
        self._possible_numbers: set[int] = set()

    @property
    def folder(self) -> ObjectPath:
        """The folder with the files."""
        return checkpoint_folder(self._run, self._tag, self.folder_id)

    @traced("publish", "commit")
    def publish(self, finished: Manifest, *, overwrite: bool, is_corrupt: bool = False) -> Manifest:
        """Create the pointer, when all files are there. Return the manifest.

        If another folder with this checkpoint has the tag, nothing is done. An abandoned checkpoint of the run that has
        the tag gets another one, unless it ``is_corrupt``. Raises ``TagExistsError`` if another checkpoint has it.

        Called in the vote "completing the files".
        """
        pointer = Pointer.of(finished, self.folder_id)
        data = msgspec.json.encode(pointer)
        for _ in range(_PUBLISH_ATTEMPTS):
            self._checks.before()
            entry = find_tag(self._run, self._tag)
            check_readable([] if entry is None else [entry])
            if entry is not None and entry.names_folder(self.folder_id):  # by an attempt that seemed to fail
                self._possible_numbers.add(entry.number)
                self._check_intact(entry.path, finished)
                return finished
            if entry is not None and entry.names_checkpoint(finished.id):
                self.discard()
                return finished
            is_free = entry is None or (not is_corrupt and self._free_tag(entry, finished))
            if entry is not None and not is_free:
                self._check_replaceable(entry, pointer, overwrite=overwrite)
            self._replaced = None if is_free else entry
            if self._create_pointer(1 if entry is None else entry.number + 1, data, finished):
                return finished
            time.sleep(_PUBLISH_SECONDS)
        raise StorageError(errno.EBUSY, f"could not publish {self.folder}: other processes take its tag all the time")

    def _free_tag(self, entry: TagEntry, finished: Manifest) -> bool:
        """Give an abandoned checkpoint of the same run that has the tag another one. Return whether it has one."""
        if isinstance(entry.pointer, Pointer) and entry.pointer.run != finished.run:
            return False
        from rankless.run.abandoned_tags import name_abandoned_object  # noqa: PLC0415 - few runs go back

        return name_abandoned_object(self._run, entry, finished)

    def _create_pointer(self, number: int, data: bytes, finished: Manifest) -> bool:
        """Create a pointer. Return whether it counts: whether no other process has created it, or a higher one."""
        path = pointer_path(self._run, self._tag, number)
        self._possible_numbers.add(number)
        # A store with conditions that are not atomic, or which ignores them, may let two writers create one object. If
        # it says that the pointer exists, an attempt may have created it without getting the answer, or the store is
        # wrong.
        stored = path.store.read_back(path) if path.store.create_object(path, data) else find_bytes(path)
        if stored != data:
            if is_pointer(stored):  # another save's; bytes that are no pointer may be the answer of a proxy
                self._possible_numbers.discard(number)
            return False
        if find_highest_number(self._run, self._tag) > number:  # another process has removed the lower ones meanwhile
            self._run.store.remove_file(path)
            self._possible_numbers.discard(number)
            return False
        self._check_intact(path, finished)
        self._check_still_allowed(path, number, finished)
        return True

    def _check_intact(self, pointer: ObjectPath, finished: Manifest) -> None:
        """Withdraw the pointer if another process has begun to delete the files, because this one seemed to be dead."""
        sizes = {name: record.size for name, record in finished.files.items()}
        sizes[manifest.NAME] = len(manifest.encode_manifest(finished))
        if damage := find_damage(self.folder, sizes):
            self._run.store.remove_file(pointer)
            raise StorageError(errno.ENOENT, damage)

    def _check_still_allowed(self, pointer: ObjectPath, number: int, finished: Manifest) -> None:
        """Withdraw the pointer if it was forbidden while the request for it was under way."""
        try:
            self._checks.after(finished)
        except RanklessError:
            self._run.store.remove_file(pointer)
            self._possible_numbers.discard(number)
            raise

    def _check_replaceable(self, entry: TagEntry, pointer: Pointer, *, overwrite: bool) -> None:
        path = self._run / self._tag
        if not overwrite:
            raise TagExistsError(f"{path} exists, and was left as it is: choose another tag, or pass overwrite=True")
        if isinstance(entry.pointer, Pointer) and is_newer(entry.pointer, pointer):
            raise TagExistsError(f"another job has saved {path} meanwhile; it is newer, and left as it is")

    @traced("remove old checkpoints", "step")
    def remove_old_checkpoints(
        self, saved: KnownCheckpoint, keep: Retention | None, corrupt: Collection[CorruptRecord]
    ) -> None:
        """Remove the replaced checkpoint and those that are not kept. Failures only warn: the new one is committed.

        A checkpoint that a load found ``corrupt`` is not removed: it only loses its pointer.

        Called after the commit.
        """
        try:
            self._remove_replaced(corrupt)
            for folder in set_aside_corrupt(corrupt, self._run, saved.run):
                note_corrupt(self._run, folder)
            if keep is not None:
                expired = expired_checkpoints(self._run, saved.run, keep, incarnation=saved.incarnation)
                # One that was copied there has no pointer to lose.
                list(delete_checkpoints([info for info in expired if CorruptRecord(info.tag, info.id) not in corrupt]))
        except Exception as error:  # noqa: BLE001 - the checkpoint is committed, whatever a policy or the store raises
            warn_or_log(f"the checkpoint is saved, but an old one could not be removed: {error}")

    def _remove_replaced(self, corrupt: Collection[CorruptRecord]) -> None:
        entry = self._replaced
        if entry is None:
            return
        pointer = entry.pointer
        if isinstance(pointer, Pointer) and CorruptRecord(entry.tag, pointer.checkpoint_id) in corrupt:
            remove_pointers(self._run, entry)
            note_corrupt(self._run, entry.folder_in(self._run))
        else:
            delete_replaced(self._run, entry)

    def discard(self) -> None:
        """Delete the uploaded objects, unless they are published, or that is unknown.

        Called in the rollback of a save.
        """
        # If it is unknown whether the pointer exists, or a request for it may still arrive, a clean-up decides.
        with suppress(RanklessError):
            if not self._possible_numbers:
                discard_folder(self.folder)
