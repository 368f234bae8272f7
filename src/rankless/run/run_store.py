"""The interface between the promises of a run and the layout of its checkpoints: :class:`RunStore`.

There are two layouts. In a directory on a file system a checkpoint is a folder with the name of its tag, which it gets
by a rename; locks tell whether a process is alive. In an object store nothing can be renamed, so a small pointer names
the folder of a tag, and leases take the place of locks. Lists, saves, loads, retention, pins and commands are written
once, for any layout: they ask :func:`run_store_of`, on any rank that they run on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from rankless.run.folder_names import tag_of_folder
from rankless.storage.object_path import ObjectPath

if TYPE_CHECKING:
    from rankless.run.checkpoint_info import CheckpointInfo, RunScan


class StaleDirectory(msgspec.Struct, frozen=True):
    """A directory that a save or a removal has left, or still uses.

    ``state`` is ``"partial"``, ``"replaced"``, ``"removed"`` or ``"corrupt"``. ``nbytes`` is the disk usage of its
    files, ``time`` the time of its last change in seconds since 1970. In an object store it ``is_whole`` if it has a
    manifest, but no pointer names it.
    """

    name: str
    tag: str
    path: Path
    time: float
    nbytes: int
    state: str = "partial"
    is_whole: bool = False


class RunStore(Protocol):
    """The layout of one run. It keeps nothing but the path: a new object sees the same."""

    # Looking for checkpoints

    def look(self, *, is_strict: bool) -> RunScan:
        """Return the checkpoints of the run, oldest first, and its history. Unreadable ones come before all others.

        Other jobs may save into the run and remove from it meanwhile. If the look ``is_strict``, raise ``StorageError``
        if a checkpoint cannot be read now: the latest one is unknown then. The checkpoints are cached and shared:
        callers must not change them.
        """

    def repair_names(self) -> Collection[str]:
        """Give checkpoints their names back that an interrupted save has hidden. Return the names in the run."""

    def find_named(self, tag: str) -> Path | None:
        """Return the folder of a tag if something else than its own name says so; ``None`` if nothing does.

        Raises ``StorageError`` or ``CorruptCheckpointError`` if that cannot be read.
        """

    def has_tag(self, tag: str) -> bool:
        """Return whether a checkpoint has the tag by something else than the name of its folder."""

    def is_named(self, folder: Path) -> bool:
        """Return whether a folder is known to be a checkpoint of the run, although its manifest cannot be read."""

    def names_other(self, tag: str, checkpoint_id: str) -> bool:
        """Return whether a tag is known to name another checkpoint than the one with this id."""

    # Removing

    def list_stale(self) -> list[StaleDirectory]:
        """Return the folders that saves and removals have left, or still use."""

    def seems_alive(self, time_of_change: float) -> bool:
        """Return whether, for all that the time of the last change tells, a save in progress may go on."""

    def clean_up(self, run: str | None, tag: str | None, *, with_whole: bool) -> list[Path]:
        """Remove leftovers of dead saves: see :func:`rankless.run.cleanup.clean_up`."""

    def delete(self, info: CheckpointInfo) -> bool:
        """Delete a checkpoint, unless it is protected, was replaced, or has files of somebody else in it.

        Return whether it is deleted.
        """

    def remove_parts(self, is_unwanted: Callable[[int, str], bool]) -> list[Path]:
        """Remove parts of checkpoints from local tiers: see :mod:`rankless.run.tier_parts_removal`."""

    # Corrupt checkpoints

    def find_state(self, tag: str, checkpoint_id: str) -> str:
        """Return the present state of the checkpoint with a tag and an id: it differs if the checkpoint was changed."""

    def has_state(self, folder: Path, state: str) -> bool:
        """Return whether the checkpoint at a path of the run has this state."""

    def set_aside(self, tag: str, state: str, run: str) -> Path | None:
        """Take the tag from a corrupt checkpoint in this state, if ``run`` has saved it. Return where it is then."""

    # Locks between processes

    def held_pin(self, path: Path) -> AbstractContextManager[object]:
        """Hold a pin. No other process may use its name. Raises ``StorageError`` if it cannot be created."""

    def is_pin_over(self, path: Path) -> bool:
        """Remove a pin if its holder is known to be dead. Return whether it is removed, now or before."""

    def is_lock_over(self, path: Path) -> bool:
        """Return whether a lock of a removal is removed, or its process is known to be dead."""

    # The journal

    def append_journal(self, line: bytes, written_at: float, *, create: bool) -> None:
        """Add an entry to the journal. Without ``create``, only if there is a journal."""

    def read_journal(self, count: int, max_bytes: int) -> Sequence[bytes]:
        """Return entries of the journal, oldest first: at most ``count`` if each is a request, else all."""

    # Names

    def check_output_name(self, name: str) -> None:
        """Raise ``InvalidArgumentError`` if an output of the user's cannot have a name, as saves give such ones."""


def run_store_of(run: Path) -> RunStore:
    """Return the layout of a run, which need not exist. The modules of each layout are imported if it is used."""
    if isinstance(run, ObjectPath):
        from rankless.run.object_run_store import ObjectRunStore  # noqa: PLC0415

        return ObjectRunStore(run)
    from rankless.run.folder_run_store import FolderRunStore  # noqa: PLC0415

    return FolderRunStore(run)


def tag_of(checkpoint: Path) -> str:
    """Return the tag of a checkpoint in a run: the name of its directory, in an object store without the id."""
    return tag_of_folder(checkpoint.name) if isinstance(checkpoint, ObjectPath) else checkpoint.name
