"""The names of NxD's files, and the ranks in them.

Source: ``_get_path`` in ``trainer/checkpoint.py`` of NxD 0.18, and ``parallel_layers/checkpointing.py``.

The reader and the writer of NxD's format use it. The names are NxD's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from rankless.errors import CorruptCheckpointError
from rankless.storage.store import store_of

MODEL, OPTIM = "model", "optim"

#: The value files next to these folders, by component.
VALUES = {"scheduler": "scheduler.pt", "user_content": "user_content.pt"}

#: Suffixes next to a rank's file if its tensors are in separate files.
TENSORS, INFO = ".tensors", ".info.pt"

_NAME = re.compile(
    r"(?:dp_rank_(?P<dp>\d{2,6})_)?(?:ep_rank_(?P<ep>\d{2,6})_)?tp_rank_(?P<tp>\d{2,6})_pp_rank_(?P<pp>\d{2,6})\.pt"
)
_FULL = re.compile(r"full_tp_rank_(?P<tp>\d{2,6})_pp_rank_(?P<pp>\d{2,6})\.pt")
_LEGACY = re.compile(r"tp_rank_(?P<tp>\d{2,6})(?:_pp_rank_(?P<pp>\d{2,6}))?(?:_dp_rank_(?P<dp>\d{2,6}))?")
_LEGACY_ZERO = re.compile(r"optim\.dp_rank_(?P<dp>\d{2,6})\.tp_rank_(?P<tp>\d{2,6})")


class RankCoordinates(NamedTuple):
    """The ranks in the data-parallel, expert-parallel, tensor-parallel and pipeline-parallel groups."""

    dp: int
    ep: int
    tp: int
    pp: int

    def file_name(self, *, experts: bool) -> str:
        """Return the name of the rank's file. For example, ``dp_rank_00_tp_rank_01_pp_rank_00.pt``."""
        ep = f"_ep_rank_{self.ep:02}" if experts else ""
        return f"dp_rank_{self.dp:02}{ep}_tp_rank_{self.tp:02}_pp_rank_{self.pp:02}.pt"


def full_name(tp: int, pp: int) -> str:
    """Return the name that NxD's converter gives to the joined file of all data-parallel ranks.

    For example, ``full_tp_rank_01_pp_rank_00.pt``.
    """
    return f"full_tp_rank_{tp:02}_pp_rank_{pp:02}.pt"


class RankFiles(NamedTuple):
    """The files of the ranks of a checkpoint; ``degrees`` are the numbers of ranks of each kind."""

    files: Mapping[RankCoordinates, Path]
    degrees: RankCoordinates
    experts: bool = False
    full: bool = False


def find_rank_files(folder: Path) -> RankFiles | None:
    """Return the ranks' files in ``model/`` or ``optim/``, or ``None`` if there are none.

    Raises ``CorruptCheckpointError`` naming the first missing file, or two files of one rank.
    """
    files = store_of(folder).list_files(folder)
    ranks, full = (_group_by_rank(folder, ((file.name, file) for file in files), kind) for kind in (_NAME, _FULL))
    if ranks and full:
        raise CorruptCheckpointError(
            f"{folder} has both whole states, such as {next(iter(full.values())).name}, and shards"
        )
    if not ranks and not full:
        return None
    experts = any("ep_rank" in file.name for file in ranks.values())
    if experts and not all("ep_rank" in file.name for file in ranks.values()):
        raise CorruptCheckpointError(
            f"{folder} has files with and without expert-parallel ranks: they are from two checkpoints"
        )
    return RankFiles(*_require_complete(ranks or full, folder, experts=experts), experts, bool(full))


def _require_complete(
    files: Mapping[RankCoordinates, Path], folder: Path, *, experts: bool
) -> tuple[Mapping[RankCoordinates, Path], RankCoordinates]:
    """Return all files in the order of :func:`list_ranks`, and the numbers of ranks. Raises if a file is missing."""
    degrees = RankCoordinates(*(max(kind) + 1 for kind in zip(*files, strict=True)))
    for rank in list_ranks(degrees):
        if rank not in files:
            raise CorruptCheckpointError(
                f"{folder / rank.file_name(experts=experts)} is missing, or other files are from another checkpoint: "
                f"they are of {degrees.dp} data-parallel, {degrees.ep} expert-parallel, {degrees.tp} tensor-parallel "
                f"and {degrees.pp} pipeline-parallel ranks"
            )
    return {rank: files[rank] for rank in list_ranks(degrees)}, degrees


def list_ranks(degrees: RankCoordinates) -> Iterable[RankCoordinates]:
    """Return all ranks, with the pipeline stages outermost and the data-parallel ranks innermost."""
    return (
        RankCoordinates(dp, ep, tp, pp)
        for pp in range(degrees.pp)
        for ep in range(degrees.ep)
        for tp in range(degrees.tp)
        for dp in range(degrees.dp)
    )


def find_legacy_files(folder: Path) -> RankFiles | None:
    """Return the files that ``parallel_layers.save`` or Lightning's ``NeuronCheckpointIO`` wrote into a folder."""
    named = [(file.name, file) for file in store_of(folder).list_files(folder)]
    nested = [
        (subfolder.name, subfolder / "checkpoint.pt") for subfolder in store_of(folder).list_subdirectories(folder)
    ]
    named += [(name, file) for name, file in nested if store_of(file).file_exists(file)]
    files = _group_by_rank(folder, named, _LEGACY)
    return RankFiles(*_require_complete(files, folder, experts=False)) if files else None


def find_legacy_zero_files(folder: Path) -> RankFiles | None:
    """Return the files that ``NeuronZero1Optimizer.save_sharded_state_dict`` wrote into a folder."""
    files = _group_by_rank(folder, ((file.name, file) for file in store_of(folder).list_files(folder)), _LEGACY_ZERO)
    return RankFiles(*_require_complete(files, folder, experts=False)) if files else None


def _group_by_rank(
    folder: Path, named: Iterable[tuple[str, Path]], kind: re.Pattern[str]
) -> dict[RankCoordinates, Path]:
    """Return the files by the ranks in their names. Raises ``CorruptCheckpointError`` for two files of one rank."""
    files: dict[RankCoordinates, Path] = {}
    for name, file in named:
        match = kind.fullmatch(name)
        if match is None:
            continue
        rank = _parse_rank(match)
        if rank in files:
            raise CorruptCheckpointError(f"{folder}: {files[rank].name} and {name} are both of {rank}")
        files[rank] = file
    return files


def _parse_rank(match: re.Match[str]) -> RankCoordinates:
    numbers = match.groupdict()
    return RankCoordinates(*(int(numbers.get(kind) or 0) for kind in RankCoordinates._fields))


def has_rank_files(folder: Path) -> bool:
    """Return whether a folder has ranks' files; for format detection."""
    return any(_NAME.fullmatch(file.name) or _FULL.fullmatch(file.name) for file in store_of(folder).list_files(folder))


def has_legacy_files(folder: Path) -> bool:
    """Return whether a folder has legacy files."""
    return any(
        _LEGACY.fullmatch(file.name) or _LEGACY_ZERO.fullmatch(file.name)
        for file in store_of(folder).list_files(folder)
    ) or any(
        _LEGACY.fullmatch(subfolder.name) and store_of(subfolder).file_exists(subfolder / "checkpoint.pt")
        for subfolder in store_of(folder).list_subdirectories(folder)
    )
