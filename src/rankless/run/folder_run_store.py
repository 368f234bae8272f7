"""A run in a directory of a file system: the name of a checkpoint's folder is its tag, which it gets by a rename."""

from __future__ import annotations

import errno
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, closing, suppress
from pathlib import Path

import msgspec

from rankless.errors import CheckpointReplacedError, StorageError, TagExistsError
from rankless.ondisk.hidden_names import HiddenName, parse_hidden_name
from rankless.run.checkpoint_info import (
    CheckpointInfo,
    RunScan,
    read_info,
    read_info_strictly,
    recall_info,
    sort_infos,
    with_added_metrics,
)
from rankless.run.displaced_checkpoints import displaced_checkpoints, finish_interrupted_replace
from rankless.run.journal import MAX_BYTES
from rankless.run.owned_lock import ABANDONED_SECONDS, OwnedLock, acquire_as_owner
from rankless.run.records_folder import JOURNAL, OLDER_JOURNAL, records_of
from rankless.run.run_store import StaleDirectory
from rankless.run.stored_history import read_history_in
from rankless.run.tier_parts_removal import FOLDER as PARTS
from rankless.run.tier_parts_removal import LOCK as PARTS_LOCK
from rankless.run.tier_parts_removal import select_parts
from rankless.storage import atomic_rename, posix
from rankless.storage.appended_file import append_line, read_lines
from rankless.storage.directory_trees import remove_tree
from rankless.storage.file_lock import FileLock
from rankless.storage.filesystem_kind import forget_missing


class FolderRunStore(msgspec.Struct, frozen=True):
    """A :class:`rankless.run.run_store.RunStore` in a directory."""

    run: Path

    def look(self, *, is_strict: bool) -> RunScan:
        """See :class:`RunStore`. All names are listed in one step, and again if a checkpoint was removed meanwhile.

        So a directory that always contains a checkpoint never appears to be empty.
        """
        run, read = self.run, read_info_strictly if is_strict else read_info
        infos: dict[str, CheckpointInfo | None] = {}
        while True:
            names = posix.list_names(run) or self._list_missing()
            tags = _candidate_tags(names)
            for name in sorted(tags.keys() - infos.keys()):
                with suppress(CheckpointReplacedError):
                    infos[name] = recall_info(run, name, tags[name]) or read(run / name, tags[name])
            if tags.keys() <= infos.keys():
                checkpoints = [info for name in tags if (info := infos[name]) is not None]
                history, highest = read_history_in(run, names)
                return RunScan(sort_infos(with_added_metrics(run, names, checkpoints), history), history, highest)

    def _list_missing(self) -> set[str]:
        """Return the names in a directory that seems to be empty or missing, after its file server was asked for it.

        Another host may have made it since this one has looked.
        """
        forget_missing(self.run)
        return posix.list_names(self.run)

    def repair_names(self) -> Collection[str]:
        """See :class:`RunStore`."""
        return finish_interrupted_replace(self.run)

    def find_named(self, tag: str) -> Path | None:
        """See :class:`RunStore`. A folder has its own name, unless a save that replaced it has died in between."""
        del tag
        return None

    def has_tag(self, tag: str) -> bool:
        """See :class:`RunStore`."""
        del tag
        return False

    def is_named(self, folder: Path) -> bool:
        """See :class:`RunStore`. Without its manifest a folder is anything."""
        del folder
        return False

    def names_other(self, tag: str, checkpoint_id: str) -> bool:
        """See :class:`RunStore`. The manifest tells it."""
        del tag, checkpoint_id
        return False

    def list_stale(self) -> list[StaleDirectory]:
        """See :class:`RunStore`."""
        displaced = {hidden.name for hidden in displaced_checkpoints(posix.list_names(self.run))}
        stale = []
        for folder in posix.list_hidden_directories(self.run):
            hidden = parse_hidden_name(folder.name)
            if hidden is None or folder.name in displaced:
                continue
            if usage := posix.disk_usage(folder):  # else it was committed or removed meanwhile
                stale.append(StaleDirectory(folder.name, hidden.tag, folder, *usage, hidden.state))
        return stale

    def seems_alive(self, time_of_change: float) -> bool:
        """See :class:`RunStore`. A lock tells it, and no time."""
        del time_of_change
        return False

    def clean_up(self, run: str | None, tag: str | None, *, with_whole: bool) -> list[Path]:
        """See :class:`RunStore`."""
        del with_whole
        from rankless.run import folder_removal  # noqa: PLC0415 - a load removes nothing

        return folder_removal.remove_dead_directories(self.run, run, tag)

    def delete(self, info: CheckpointInfo) -> bool:
        """See :class:`RunStore`."""
        from rankless.run import folder_removal  # noqa: PLC0415 - as above

        return folder_removal.delete_unprotected(info)

    def remove_parts(self, is_unwanted: Callable[[int, str], bool]) -> list[Path]:
        """See :class:`RunStore`. If a process writes a checkpoint from parts now, all stay."""
        folder, removed = self.run / PARTS, list[Path]()
        names = posix.list_names(folder)
        if PARTS_LOCK in names and not _remove_lock(folder / PARTS_LOCK):
            return removed
        for name in select_parts(names, is_unwanted):
            remove_tree(folder / name)
            removed.append(folder / name)
        if names <= {PARTS_LOCK, *(path.name for path in removed)}:
            with suppress(StorageError):  # another process uses it, or has removed it
                posix.remove_empty_directory(folder)
        return removed

    def find_state(self, tag: str, checkpoint_id: str) -> str:
        """See :class:`RunStore`. It is the state of all its files, which somebody may repair."""
        del checkpoint_id
        return posix.tree_state(self.run / tag)

    def has_state(self, folder: Path, state: str) -> bool:
        """See :class:`RunStore`."""
        return bool(state) and posix.tree_state(folder) == state

    def set_aside(self, tag: str, state: str, run: str) -> Path | None:
        """See :class:`RunStore`. It gets a hidden name."""
        folder, hidden = self.run / tag, self.run / HiddenName(tag, run, secrets.token_hex(8), "corrupt").name
        if not self.has_state(folder, state) or not _is_saved_by(run, folder, tag):
            return None
        atomic_rename.rename_path(folder, hidden)
        if self.has_state(hidden, state):
            return hidden
        with suppress(TagExistsError):  # another checkpoint took the name between the check and the rename
            atomic_rename.rename_noreplace(hidden, folder)
        return None

    def held_pin(self, path: Path) -> AbstractContextManager[object]:
        """See :class:`RunStore`."""
        return closing(acquire_as_owner(path, lambda: OwnedLock(path)))

    def is_pin_over(self, path: Path) -> bool:
        """See :class:`RunStore`."""
        try:
            with posix.wrap_os_errors("lock", path), closing(OwnedLock(path, create=False)) as lock:
                is_dead = lock.proves_death() or _is_abandoned(path)
                if is_dead:
                    lock.remove()
                return is_dead
        except StorageError as error:
            return error.errno == errno.ENOENT or (error.errno != errno.EWOULDBLOCK and _is_abandoned(path))

    def is_lock_over(self, path: Path) -> bool:
        """See :class:`RunStore`."""
        try:
            with posix.wrap_os_errors("lock", path), closing(OwnedLock(path, create=False)) as lock:
                return lock.proves_death()
        except StorageError as error:
            return error.errno == errno.ENOENT

    def append_journal(self, line: bytes, written_at: float, *, create: bool) -> None:
        """See :class:`RunStore`. The time is in the line."""
        del written_at
        folder = records_of(self.run)
        append_line(folder / JOURNAL, line, limit=MAX_BYTES, older=folder / OLDER_JOURNAL, create=create)

    def read_journal(self, count: int, max_bytes: int) -> Sequence[bytes]:
        """See :class:`RunStore`."""
        del count, max_bytes
        folder = records_of(self.run)
        return [line for name in (OLDER_JOURNAL, JOURNAL) for line in read_lines(folder / name, 2 * MAX_BYTES)]

    def check_output_name(self, name: str) -> None:
        """See :class:`RunStore`. Saves hide incomplete checkpoints."""
        del name


def _candidate_tags(names: Collection[str]) -> dict[str, str]:
    """Return the names of directories that may be checkpoints, with their tags."""
    visible = {name: name for name in names if not name.startswith(".")}
    return visible | {hidden.name: hidden.tag for hidden in displaced_checkpoints(names)}


def _is_saved_by(run: str, folder: Path, tag: str) -> bool:
    with suppress(CheckpointReplacedError):
        info = read_info(folder, tag)
        return info is not None and info.run == run and info.saved_as == tag
    return False


def _is_abandoned(path: Path) -> bool:
    """Return whether a pin is a day old. This counts if its lock proves nothing, or belongs to another user."""
    with suppress(StorageError):
        return time.time() - posix.last_change_time(path) > ABANDONED_SECONDS
    return False


def _remove_lock(path: Path) -> bool:
    """Remove the lock file, unless a process holds the lock. Return whether none does."""
    try:
        FileLock(path, create=False).remove()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
