"""Which of the checkpoints in a folder of NxD's is the newest that was finished.

Every release had another sign: a text file ``newest`` (to 0.6), ``done`` (0.7), ``checkpoint`` for those begun (0.8).
"""

from __future__ import annotations

import re
from pathlib import Path

from holdfast.errors import DamagedError, NoCheckpointError
from holdfast.formats.nxd import names
from holdfast.storage import local

BEGUN, DONE, NEWEST = "checkpoint", "done", "newest"

#: What is written last, in this order: who finds the second takes the checkpoint for complete.
MARKERS = (BEGUN, DONE)


def is_tag(path: Path) -> bool:
    """Whether a folder is one checkpoint."""
    return any(names.has_ranks(path / kind) for kind in (names.MODEL, names.OPTIM)) or names.has_legacy(path)


def is_run(path: Path) -> bool:
    """Whether a folder has checkpoints in it."""
    return local.is_folder(path) and any(is_tag(folder) for folder in local.subfolders(path))


def tensor_parallel(path: Path) -> int:
    """How many tensor-parallel ranks a checkpoint is of."""
    found = names.find(path / names.MODEL) or names.find_legacy(path) or names.find(path / names.OPTIM)
    return 1 if found is None else found.degrees.tp


def check_finished(path: Path) -> None:
    """Raise ``DamagedError`` for a checkpoint that was begun and never finished."""
    if local.is_file(path / BEGUN) and not local.is_file(path / DONE):
        raise DamagedError(
            f"{path} was begun and has no {DONE!r} in it: its save never ended, or, with async_save, nobody called "
            f"finalize_checkpoint. If you know that it is whole, make an empty file of that name"
        )


def newest(path: Path) -> Path:
    """The newest checkpoint in a folder that was finished. Raises ``NoCheckpointError``.

    By the number in its name; not by the time of a file, which every copy changes.
    """
    tags = [folder for folder in local.subfolders(path) if is_tag(folder)]
    if local.is_taken(path / NEWEST):
        local.check_regular(path / NEWEST, within=(path,))
        lines = local.read_small(path / NEWEST).decode(errors="replace").split()
        if named := [path / line for line in lines if path / line in tags]:
            return named[-1]
    finished = [tag for tag in tags if local.is_file(tag / DONE) or not local.is_file(tag / BEGUN)]
    if not finished:
        raise NoCheckpointError(f"none of the checkpoints in {path} was finished")
    return max(finished, key=_order)


def _order(tag: Path) -> tuple[list[int], str]:
    return [int(number) for number in re.findall(r"\d+", tag.name)[-1:]], tag.name
