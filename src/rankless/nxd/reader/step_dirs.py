"""The checkpoints in a folder of NxD's, and which of them is the newest complete one.

Each release marks them differently: a text file ``newest`` (up to 0.6), a file ``done`` in complete ones (0.7), and
also ``checkpoint`` in those that were begun (0.8).

The reader asks it on each rank, :mod:`rankless.nxd.nxd_calls` before a load. The markers are NxD's.
"""

from __future__ import annotations

import re
from pathlib import Path

from rankless.errors import CorruptCheckpointError, NoCheckpointError
from rankless.nxd.reader import nxd_file_names
from rankless.storage.store import store_of

BEGUN, DONE, NEWEST = "checkpoint", "done", "newest"

#: The marker files, which are written last, in this order. The second marks a checkpoint as complete.
MARKERS = (BEGUN, DONE)


def is_tag(path: Path) -> bool:
    """Return whether a folder is one checkpoint."""
    return any(
        nxd_file_names.has_rank_files(path / kind) for kind in (nxd_file_names.MODEL, nxd_file_names.OPTIM)
    ) or nxd_file_names.has_legacy_files(path)


def is_nxd_run(path: Path) -> bool:
    """Return whether a folder contains checkpoints."""
    store = store_of(path)
    return store.is_directory(path) and any(is_tag(folder) for folder in store.list_subdirectories(path))


def tensor_parallel_degree(path: Path) -> int:
    """Return the number of tensor-parallel ranks of a checkpoint."""
    rank_files = (
        nxd_file_names.find_rank_files(path / nxd_file_names.MODEL)
        or nxd_file_names.find_legacy_files(path)
        or nxd_file_names.find_rank_files(path / nxd_file_names.OPTIM)
    )
    return 1 if rank_files is None else rank_files.degrees.tp


def check_finished(path: Path) -> None:
    """Raise ``CorruptCheckpointError`` for a checkpoint that was begun and not finished."""
    store = store_of(path)
    if store.is_file(path / BEGUN) and not store.is_file(path / DONE):
        raise CorruptCheckpointError(
            f"{path} was begun and has no {DONE!r} in it: its save did not end or, with async_save, "
            f"finalize_checkpoint was not called. If you know that it is complete, create an empty file of that name"
        )


def newest_tag(path: Path) -> Path:
    """Return the newest finished checkpoint in a folder. Raises ``NoCheckpointError`` if there is none.

    Goes by the number in the name, not by a file's time, which every copy changes.
    """
    store = store_of(path)
    tags = [folder for folder in store.list_subdirectories(path) if is_tag(folder)]
    if store.file_exists(path / NEWEST):
        store.check_regular(path / NEWEST, within=(path,))
        lines = store.read_small(path / NEWEST).decode(errors="replace").split()
        if named := [path / line for line in lines if path / line in tags]:
            return named[-1]
    finished = [tag for tag in tags if store.is_file(tag / DONE) or not store.is_file(tag / BEGUN)]
    if not finished:
        raise NoCheckpointError(f"none of the checkpoints in {path} was finished")
    return max(finished, key=_sort_key)


def _sort_key(tag: Path) -> tuple[list[int], str]:
    """Return the last number in a tag's name, and the name. For example, ``step_100`` comes after ``step_20``."""
    return [int(number) for number in re.findall(r"\d+", tag.name)[-1:]], tag.name
