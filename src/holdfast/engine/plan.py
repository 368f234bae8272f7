"""Who writes which bytes: a pure function of the specs of all ranks and the number of this one."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.engine.runs import Run, local_runs
from holdfast.engine.spec import Held, Membership, infos
from holdfast.engine.transfer import Piece
from holdfast.errors import StateError
from holdfast.layout.dtypes import width
from holdfast.layout.files import DataFile, pack

#: Holders of one run do not split it into pieces smaller than this, in bytes; whole sectors.
SMALLEST = 2**20


@dataclass(frozen=True, slots=True)
class Replica:
    """A run of bytes that this rank holds as others do: they must be equal."""

    tensor: int
    run: Run
    local: int


@dataclass(frozen=True)
class SavePlan:
    """The files of a checkpoint, and this rank's share of the writing."""

    files: Sequence[DataFile]
    groups: Mapping[str, Sequence[DataFile]]
    tensors: Sequence[tuple[str, str]]
    pieces: Sequence[Piece]
    replicas: Mapping[tuple[int, ...], Sequence[Replica]]


#: The plan of a save of nothing.
NOTHING = SavePlan((), {}, (), (), {})


class _Item(NamedTuple):
    """A run with several holders, ready to be split: its place in the tensor, the local part and the file."""

    piece: Piece
    size: int


def plan_save(membership: Membership, rank: int, global_ranks: Sequence[int], limit: int) -> SavePlan:
    """The plan of ``rank``. Equal for the same specs; the files in it are equal for every rank.

    ``global_ranks`` are the job-wide numbers of the group's ranks, by which meshes name them; ``limit`` is
    the most bytes of tensors in one file.
    """
    held = {(tensor.group, tensor.name): tensor for tensor in membership.tensors()}
    tied = membership.tied()
    groups = {
        group: pack(group, names, tied.get(group, {}), limit) for group, names in infos(list(held.values())).items()
    }
    files = [file for group in groups.values() for file in group]
    names = [(group, name) for group, shelf in groups.items() for file in shelf for name in file.entries]
    starts = [
        (number, file.data_start + entry.data_offsets[0])
        for number, file in enumerate(files)
        for entry in file.entries.values()
    ]
    own = _Share(rank, {number: place for place, number in enumerate(global_ranks)}, global_ranks)
    for tensor, (key, (file, offset)) in enumerate(zip(names, starts, strict=True)):
        own.add(tensor, held[key], file, offset)
    return SavePlan(files, groups, names, own.pieces(), own.replicas)


class _Share:
    """Collects what one rank writes and proves."""

    def __init__(self, rank: int, place_of: Mapping[int, int], global_ranks: Sequence[int]) -> None:
        self._rank, self._place_of, self._global = rank, place_of, global_ranks
        self._mine: list[Piece] = []
        self._shared: dict[tuple[int, ...], list[_Item]] = {}
        self.replicas: dict[tuple[int, ...], list[Replica]] = {}

    def add(self, tensor: int, held: Held, file: int, offset: int) -> None:
        """Take note of one tensor."""
        holders, runs = self._holding(held)
        if len(holders) > 1 and not held.shared:
            holders = holders[:1]
        if self._rank not in holders:
            return
        local = 0
        for run in runs:
            piece = Piece(tensor, run.start, run.stop, local, file, offset + run.start)
            if len(holders) == 1:
                self._mine.append(piece)
            else:
                self._shared.setdefault(holders, []).append(_Item(piece, run.stop - run.start))
                self.replicas.setdefault(holders, []).append(Replica(tensor, run, local))
            local += run.stop - run.start

    def _holding(self, held: Held) -> tuple[tuple[int, ...], Sequence[Run]]:
        if held.layout is None:
            return held.holders, [Run(0, held.info.nbytes)]
        me = self._global[self._rank]
        size = width(held.info.dtype)
        runs = [Run(start * size, stop * size) for start, stop in local_runs(held.info.shape, held.layout, me)]
        outside = set(held.layout.ranks) - self._place_of.keys()
        if outside:
            raise StateError(
                f"{held.group} tensor {held.name!r} is sharded over rank {min(outside)}, "
                "which is not in the process group that saves it"
            )
        return tuple(sorted(self._place_of[number] for number in held.layout.holders(me))), runs

    def pieces(self) -> list[Piece]:
        """What this rank writes, in the order of the files."""
        split = (
            split_evenly(items, holders.index(self._rank), len(holders)) for holders, items in self._shared.items()
        )
        pieces = itertools.chain(self._mine, *split)
        return sorted(
            (piece for piece in pieces if piece.start < piece.stop), key=lambda piece: (piece.file, piece.offset)
        )


def split_evenly(items: Sequence[_Item], part: int, parts: int) -> list[Piece]:
    """The ``part``-th of ``parts`` shares of some runs: neighbours in their files, about equally many bytes.

    A cut inside a run leaves at least :data:`SMALLEST` bytes on both sides and falls on a multiple of it in the file.
    """
    ends = list(itertools.accumulate(item.size for item in items))
    low, high = _cut(items, ends, part, parts), _cut(items, ends, part + 1, parts)
    first = bisect.bisect_right(ends, low)
    result = []
    for (piece, size), end in zip(items[first:], ends[first:], strict=True):
        start = end - size
        if start >= high:
            break
        skip, keep = max(low - start, 0), min(high - start, size)
        result.append(piece.cut(skip, keep - skip))
    return result


def _cut(items: Sequence[_Item], ends: Sequence[int], part: int, parts: int) -> int:
    """Where the shares before ``part`` end, in bytes over all items."""
    ideal = ends[-1] * part // parts
    at = bisect.bisect_right(ends, ideal)
    if at == len(items):
        return ends[-1]
    piece, size = items[at]
    start = ends[at] - size
    inside = (piece.offset + ideal - start) // SMALLEST * SMALLEST - piece.offset
    if inside < SMALLEST:
        return start
    return start + inside if size - inside >= SMALLEST else ends[at]
