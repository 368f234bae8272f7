"""Which of the checkpoints in a folder of NxD's is the newest that was finished.

Every release had another sign: a text file ``newest`` (to 0.6), ``done`` (0.7), ``checkpoint`` for those begun (0.8).
"""

from __future__ import annotations

import re
from pathlib import Path

from holdfast.compat.nxd.format import file_names
from holdfast.errors import CorruptCheckpointError, NoCheckpointError
from holdfast.storage import posix

BEGUN, DONE, NEWEST = "checkpoint", "done", "newest"

#: What is written last, in this order: who finds the second takes the checkpoint for complete.
MARKERS = (BEGUN, DONE)


def is_tag(path: Path) -> bool:
    """Whether a folder is one checkpoint."""
    return any(
        file_names.has_rank_files(path / kind) for kind in (file_names.MODEL, file_names.OPTIM)
    ) or file_names.has_legacy_files(path)


def is_nxd_run(path: Path) -> bool:
    """Whether a folder has checkpoints in it."""
    return posix.is_directory(path) and any(is_tag(folder) for folder in posix.list_subdirectories(path))


def tensor_parallel_degree(path: Path) -> int:
    """How many tensor-parallel ranks a checkpoint is of."""
    found = (
        file_names.find_rank_files(path / file_names.MODEL)
        or file_names.find_legacy(path)
        or file_names.find_rank_files(path / file_names.OPTIM)
    )
    return 1 if found is None else found.degrees.tp


def check_finished(path: Path) -> None:
    """Raise ``CorruptCheckpointError`` for a checkpoint that was begun and never finished."""
    if posix.is_file(path / BEGUN) and not posix.is_file(path / DONE):
        raise CorruptCheckpointError(
            f"{path} was begun and has no {DONE!r} in it: its save never ended, or, with async_save, nobody called "
            f"finalize_checkpoint. If you know that it is whole, make an empty file of that name"
        )


def newest_tag(path: Path) -> Path:
    """The newest checkpoint in a folder that was finished. Raises ``NoCheckpointError``.

    By the number in its name; not by the time of a file, which every copy changes.
    """
    tags = [folder for folder in posix.list_subdirectories(path) if is_tag(folder)]
    if posix.is_taken(path / NEWEST):
        posix.check_regular(path / NEWEST, within=(path,))
        lines = posix.read_small(path / NEWEST).decode(errors="replace").split()
        if named := [path / line for line in lines if path / line in tags]:
            return named[-1]
    finished = [tag for tag in tags if posix.is_file(tag / DONE) or not posix.is_file(tag / BEGUN)]
    if not finished:
        raise NoCheckpointError(f"none of the checkpoints in {path} was finished")
    return max(finished, key=_order)


def _order(tag: Path) -> tuple[list[int], str]:
    return [int(number) for number in re.findall(r"\d+", tag.name)[-1:]], tag.name
