"""A run in an object store: a pointer names the folder of a tag. See :mod:`rankless.run.object_run` for the keys."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import msgspec

from rankless.errors import CheckpointReplacedError, CorruptCheckpointError, RanklessError, StorageError
from rankless.ondisk.manifest import NAME
from rankless.run import object_journal, object_removal, object_run
from rankless.run.checkpoint_info import (
    CheckpointInfo,
    RunScan,
    error_text,
    read_info,
    read_info_strictly,
    sort_infos,
    with_added_metrics,
)
from rankless.run.folder_names import is_copied_folder, is_saved_folder, tag_of_folder
from rankless.run.journal import MAX_OBJECTS
from rankless.run.lease import LOCK_SECONDS, held_lease, remove_if_over
from rankless.run.pointers import TAGS, Pointer, TagEntry, check_readable, find_tag, list_tags
from rankless.run.run_store import StaleDirectory
from rankless.run.stored_history import read_history_in
from rankless.run.tier_parts_removal import FOLDER as PARTS
from rankless.run.tier_parts_removal import select_parts
from rankless.storage.object_path import ObjectPath, as_object
from rankless.storage.store import map_requests


class ObjectRunStore(msgspec.Struct, frozen=True):
    """A :class:`rankless.run.run_store.RunStore` below a prefix of keys."""

    run: ObjectPath

    def look(self, *, is_strict: bool) -> RunScan:
        """See :class:`RunStore`. A checkpoint has a pointer, or was copied there.

        If the run has no pointer at all, its whole folders are its checkpoints: a copy may lack hidden names.
        """
        run, read = self.run, read_info_strictly if is_strict else read_info
        names = run.store.list_names(run)
        entries = list_tags(run) if TAGS in names else []
        if is_strict:
            check_readable(entries)
        named = {entry.tag: _info_of_pointer(run, entry) for entry in entries}

        def read_folder(name: str) -> CheckpointInfo | None:
            with suppress(CheckpointReplacedError):
                return read(run / name, tag_of_folder(name))
            if is_strict and NAME in run.store.list_names(run / name):
                file = run / name / NAME
                raise StorageError(errno.EIO, f"{file} is listed, but the server does not find it: try again")
            return None

        copied = [name for name in sorted(names - named.keys()) if is_copied_folder(name)]
        unnamed = [] if entries else [name for name in sorted(names) if is_saved_folder(name)]
        found = [info for info in map_requests(read_folder, [*copied, *unnamed]) if info is not None]
        newest = {info.tag: info for info in sorted(found, key=lambda info: info.age)}
        history, highest = read_history_in(run, names)
        infos = sort_infos(with_added_metrics(run, names, [*named.values(), *newest.values()]), history)
        return RunScan(infos, history, highest, [info for info in infos if info.path.name in unnamed])

    def repair_names(self) -> Collection[str]:
        """See :class:`RunStore`. No save hides a checkpoint that it replaces."""
        return self.run.store.list_names(self.run)

    def find_named(self, tag: str) -> Path | None:
        """See :class:`RunStore`. Raises ``StorageError`` or ``CorruptCheckpointError`` if a pointer cannot be read."""
        entry = find_tag(self.run, tag)
        return None if entry is None else entry.folder_in(self.run)

    def has_tag(self, tag: str) -> bool:
        """See :class:`RunStore`. A pointer that cannot be read counts, too."""
        return find_tag(self.run, tag) is not None

    def is_named(self, folder: Path) -> bool:
        """See :class:`RunStore`. A pointer names it."""
        return object_run.is_named(as_object(folder))

    def names_other(self, tag: str, checkpoint_id: str) -> bool:
        """See :class:`RunStore`."""
        entry = find_tag(self.run, tag)
        pointer = None if entry is None else entry.pointer
        return isinstance(pointer, Pointer) and pointer.checkpoint_id != checkpoint_id

    def list_stale(self) -> list[StaleDirectory]:
        """See :class:`RunStore`. These are the folders that no pointer names, and the uploads in progress."""
        return object_run.list_unpublished(self.run, list_tags(self.run))

    def seems_alive(self, time_of_change: float) -> bool:
        """See :class:`RunStore`."""
        return object_removal.seems_alive(time_of_change)

    def clean_up(self, run: str | None, tag: str | None, *, with_whole: bool) -> list[Path]:
        """See :class:`RunStore`. Names of saves do not tell the run that they belong to."""
        del run, tag
        return object_removal.remove_abandoned(self.run, with_whole=with_whole)

    def delete(self, info: CheckpointInfo) -> bool:
        """See :class:`RunStore`."""
        return object_removal.delete_unprotected(info, as_object(info.path))

    def remove_parts(self, is_unwanted: Callable[[int, str], bool]) -> list[Path]:
        """See :class:`RunStore`. There are no locks: a process that reads parts finds that they were removed."""
        folder = self.run / PARTS
        unwanted = select_parts(folder.store.list_names(folder), is_unwanted)
        for name in sorted(unwanted, key=lambda name: (name.endswith(".data"), name)):  # tables first
            folder.store.remove_file(folder / name)
        return [folder / name for name in unwanted]

    def find_state(self, tag: str, checkpoint_id: str) -> str:
        """See :class:`RunStore`. No file of a folder is written twice, so it is the id."""
        del tag
        return checkpoint_id

    def has_state(self, folder: Path, state: str) -> bool:
        """See :class:`RunStore`. The tag has it."""
        infos = self.look(is_strict=False).checkpoints
        return any((info.tag, info.id) == (folder.name, state) for info in infos)

    def set_aside(self, tag: str, state: str, run: str) -> Path | None:
        """See :class:`RunStore`. It loses its pointers."""
        entry = find_tag(self.run, tag)
        if entry is None or not isinstance(entry.pointer, Pointer):
            return None
        if not entry.names_checkpoint(state) or entry.pointer.run != run:
            return None
        object_removal.remove_pointers(self.run, entry)
        return entry.folder_in(self.run)

    def held_pin(self, path: Path) -> AbstractContextManager[object]:
        """See :class:`RunStore`."""
        return held_lease(as_object(path))

    def is_pin_over(self, path: Path) -> bool:
        """See :class:`RunStore`."""
        return remove_if_over(as_object(path))

    def is_lock_over(self, path: Path) -> bool:
        """See :class:`RunStore`."""
        return remove_if_over(as_object(path), LOCK_SECONDS)

    def append_journal(self, line: bytes, written_at: float, *, create: bool) -> None:
        """See :class:`RunStore`. Each entry is an object."""
        object_journal.append_object(self.run, line, written_at, limit=MAX_OBJECTS, create=create)

    def read_journal(self, count: int, max_bytes: int) -> Sequence[bytes]:
        """See :class:`RunStore`."""
        return object_journal.read_objects(self.run, count, max_bytes)

    def check_output_name(self, name: str) -> None:
        """See :class:`RunStore`."""
        object_run.check_output_name(self.run / name)


def _info_of_pointer(run: ObjectPath, entry: TagEntry) -> CheckpointInfo:
    pointer = entry.pointer
    if isinstance(pointer, RanklessError):
        is_corrupt = isinstance(pointer, CorruptCheckpointError)
        status = "damaged" if is_corrupt else "unreadable"
        return CheckpointInfo(entry.tag, entry.path, status, problem=error_text(pointer))  # type: ignore[arg-type]
    return CheckpointInfo(
        tag=entry.tag,
        path=entry.folder_in(run),
        step=pointer.step,
        metrics=dict(pointer.metrics),
        sequence=pointer.sequence,
        time=pointer.time,
        nbytes=pointer.nbytes,
        run=pointer.run,
        id=pointer.checkpoint_id,
        saved_as=pointer.saved_as or entry.tag,
        world_size=pointer.world_size,
        incarnation=pointer.incarnation,
    )
