"""The names of NxD's files, and which ranks they tell of.

Source: ``_get_path`` in ``trainer/checkpoint.py`` of NxD 0.18, and ``parallel_layers/checkpointing.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import CorruptCheckpointError
from holdfast.storage import posix

MODEL, OPTIM = "model", "optim"

#: The files beside their folders, by what they hold.
VALUES = {"scheduler": "scheduler.pt", "user_content": "user_content.pt"}

#: What is beside a rank's file where its tensors have files of their own.
TENSORS, INFO = ".tensors", ".info.pt"

_NAME = re.compile(
    r"(?:dp_rank_(?P<dp>\d{2,6})_)?(?:ep_rank_(?P<ep>\d{2,6})_)?tp_rank_(?P<tp>\d{2,6})_pp_rank_(?P<pp>\d{2,6})\.pt"
)
_FULL = re.compile(r"full_tp_rank_(?P<tp>\d{2,6})_pp_rank_(?P<pp>\d{2,6})\.pt")
_LEGACY = re.compile(r"tp_rank_(?P<tp>\d{2,6})(?:_pp_rank_(?P<pp>\d{2,6}))?(?:_dp_rank_(?P<dp>\d{2,6}))?")
_LEGACY_ZERO = re.compile(r"optim\.dp_rank_(?P<dp>\d{2,6})\.tp_rank_(?P<tp>\d{2,6})")


class RankCoordinates(NamedTuple):
    """Ranks in the data-parallel, expert-parallel, tensor-parallel and pipeline-parallel groups."""

    dp: int
    ep: int
    tp: int
    pp: int

    def name(self, *, experts: bool) -> str:
        """The name of its file."""
        ep = f"_ep_rank_{self.ep:02}" if experts else ""
        return f"dp_rank_{self.dp:02}{ep}_tp_rank_{self.tp:02}_pp_rank_{self.pp:02}.pt"


def full_name(tp: int, pp: int) -> str:
    """The name of the file of all data-parallel ranks, as the converter calls it."""
    return f"full_tp_rank_{tp:02}_pp_rank_{pp:02}.pt"


class RankFiles(NamedTuple):
    """The files of some ranks; ``degrees`` are how many of each kind there are."""

    files: Mapping[RankCoordinates, Path]
    degrees: RankCoordinates
    experts: bool = False
    full: bool = False


def find_rank_files(folder: Path) -> RankFiles | None:
    """The ranks' files in ``model/`` or ``optim/``; ``None`` where there is none of them.

    Raises ``CorruptCheckpointError`` naming the first that is missing, or two of one rank.
    """
    files = posix.list_files(folder)
    ranks, full = (_by_rank(folder, ((file.name, file) for file in files), kind) for kind in (_NAME, _FULL))
    if ranks and full:
        raise CorruptCheckpointError(
            f"{folder} has both whole states, such as {next(iter(full.values())).name}, and shards"
        )
    if not ranks and not full:
        return None
    experts = any("ep_rank" in file.name for file in ranks.values())
    if experts and not all("ep_rank" in file.name for file in ranks.values()):
        raise CorruptCheckpointError(
            f"{folder} has files of expert-parallel ranks and others: they are of two checkpoints"
        )
    return RankFiles(*_complete(ranks or full, folder, experts=experts), experts, bool(full))


def _complete(
    files: Mapping[RankCoordinates, Path], folder: Path, *, experts: bool
) -> tuple[Mapping[RankCoordinates, Path], RankCoordinates]:
    degrees = RankCoordinates(*(max(kind) + 1 for kind in zip(*files, strict=True)))
    for rank in list_rank_files(degrees):
        if rank not in files:
            raise CorruptCheckpointError(
                f"{folder / rank.name(experts=experts)} is missing, or other files are of another checkpoint: they are "
                f"those of {degrees.dp} data-parallel, {degrees.ep} expert-parallel, {degrees.tp} tensor-parallel and "
                f"{degrees.pp} pipeline-parallel ranks"
            )
    return {rank: files[rank] for rank in list_rank_files(degrees)}, degrees


def list_rank_files(degrees: RankCoordinates) -> Iterable[RankCoordinates]:
    """All ranks, with the pipeline's stages outermost and data-parallel ranks innermost."""
    return (
        RankCoordinates(dp, ep, tp, pp)
        for pp in range(degrees.pp)
        for ep in range(degrees.ep)
        for tp in range(degrees.tp)
        for dp in range(degrees.dp)
    )


def find_legacy(folder: Path) -> RankFiles | None:
    """What ``parallel_layers.save`` and Lightning's ``NeuronCheckpointIO`` wrote, right in a folder."""
    named = [(file.name, file) for file in posix.list_files(folder)]
    inside = [(below.name, below / "checkpoint.pt") for below in posix.list_subdirectories(folder)]
    named += [(name, file) for name, file in inside if posix.is_taken(file)]
    files = _by_rank(folder, named, _LEGACY)
    return RankFiles(*_complete(files, folder, experts=False)) if files else None


def find_legacy_zero(folder: Path) -> RankFiles | None:
    """What ``NeuronZero1Optimizer.save_sharded_state_dict`` wrote, right in a folder."""
    files = _by_rank(folder, ((file.name, file) for file in posix.list_files(folder)), _LEGACY_ZERO)
    return RankFiles(*_complete(files, folder, experts=False)) if files else None


def _by_rank(folder: Path, named: Iterable[tuple[str, Path]], kind: re.Pattern[str]) -> dict[RankCoordinates, Path]:
    """Files by the ranks that their names tell of. Raises ``CorruptCheckpointError`` where two are of one rank."""
    found: dict[RankCoordinates, Path] = {}
    for name, file in named:
        match = kind.fullmatch(name)
        if match is None:
            continue
        rank = _rank(match)
        if rank in found:
            raise CorruptCheckpointError(f"{folder}: {found[rank].name} and {name} are both of {rank}")
        found[rank] = file
    return found


def _rank(match: re.Match[str]) -> RankCoordinates:
    found = match.groupdict()
    return RankCoordinates(*(int(found.get(kind) or 0) for kind in RankCoordinates._fields))


def has_rank_files(folder: Path) -> bool:
    """Whether a folder has such files; for telling formats apart."""
    return any(_NAME.fullmatch(file.name) or _FULL.fullmatch(file.name) for file in posix.list_files(folder))


def has_legacy_files(folder: Path) -> bool:
    """Whether a folder has files as those before did."""
    return any(
        _LEGACY.fullmatch(file.name) or _LEGACY_ZERO.fullmatch(file.name) for file in posix.list_files(folder)
    ) or any(
        _LEGACY.fullmatch(below.name) and posix.is_taken(below / "checkpoint.pt")
        for below in posix.list_subdirectories(folder)
    )
