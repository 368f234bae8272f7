"""The place of a run's records, its history and its journal: in the run directory, or in a folder next to it.

Frameworks, and scripts around them, list the folders of their checkpoints and take each name for one. So the code that
writes checkpoints for a framework calls :func:`keep_records_beside` on rank 0 before a save. That creates the folder
``.NAME.rankless`` next to a run directory called ``NAME``, for example ``runs/.a.rankless`` next to ``runs/a``. From
then on the records lie there. The existing files decide, so that any job, command and reader finds the same records:
the records in the run directory if there are any, as in all runs that no framework lists; else the records next to it.
Nothing is ever moved.

In an object store the records stay where they are: a framework lists a run there by its checkpoints.

:mod:`rankless.run.claims` and :class:`rankless.run.folder_run_store.FolderRunStore` ask it, on rank 0 and in commands.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from rankless.errors import StorageError
from rankless.storage.filesystem_kind import forget_missing
from rankless.storage.posix import is_directory, is_mounted, make_directory, path_exists
from rankless.storage.store import store_of

#: The folder of the history.
FOLDER = ".history"

#: The names of the journal, and of the one before.
JOURNAL, OLDER_JOURNAL = ".journal.jsonl", ".journal.1.jsonl"

#: The most bytes of a name on a disk.
_MAX_NAME = 255


def records_of(run: Path, names: Collection[str] | None = None) -> Path:
    """Return the directory that has, or will have, the records of a run. ``names`` are those in the run, if known.

    Raises ``StorageError`` if that cannot be looked at now.
    """
    if store_of(run).is_remote or (path_exists(run / FOLDER) if names is None else FOLDER in names):
        return run
    beside = _beside(run)
    if beside is None:
        return run
    if not is_directory(beside):
        forget_missing(beside)  # another host may have made it a moment ago
    return beside if is_directory(beside) else run


def keep_records_beside(run: Path) -> None:
    """Keep the records of a run next to it, unless it has some already. Call it on rank 0, before a save.

    They stay in the run directory, too, if nothing can be created next to it, or if it is where a file system is
    mounted: a folder next to it is elsewhere on another host, and removed with a container.
    """
    if store_of(run).is_remote:
        return
    with suppress(StorageError):
        beside = _beside(run)
        has_records = any(path_exists(run / name) for name in (FOLDER, JOURNAL))
        if beside is not None and not has_records and not is_mounted(run):
            make_directory(beside)


def _beside(run: Path) -> Path | None:
    """Return the folder next to a run directory, or next to the target of a link; ``None`` if it cannot have one.

    For example, ``runs/.a.rankless`` for ``runs/a``.
    """
    real = run.resolve()
    name = f".{real.name}.rankless"
    return real.with_name(name) if real.name and len(name.encode(errors="surrogateescape")) <= _MAX_NAME else None
