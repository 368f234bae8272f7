"""Who writes which bytes: a pure function of the specs of all ranks and the number of this one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.engine.plan.file_ranges import FileRange, count_bytes
from holdfast.engine.plan.global_spec import GlobalSpec, GlobalTensor
from holdfast.engine.plan.partition import split_evenly
from holdfast.engine.plan.placements import Coordinate
from holdfast.engine.plan.routes import Crossing, Locate, OwnedStripe, StripeRoutes, contiguous_requests, is_striped
from holdfast.engine.plan.shards import local_shard
from holdfast.engine.plan.split_tensors import split_ranges, stored_tensors
from holdfast.errors import StateError
from holdfast.ondisk.files import DataFile, TensorInfo, pack_files


@dataclass(frozen=True, slots=True)
class ReplicatedShard:
    """Bytes of this rank's part of a tensor that other ranks hold too: ``nbytes`` that must be equal."""

    tensor: int
    nbytes: int


@dataclass(frozen=True)
class SavePlan:
    """The files of a checkpoint, and this rank's share of the work.

    ``pieces`` it writes as they lie; ``crossings`` are stripes that it puts together or gives bytes to, in
    an order that is the same on all ranks, where any rank ``exchanges``; ``replicas`` it proves, by the ranks that
    hold them.
    """

    files: Sequence[DataFile]
    groups: Mapping[str, Sequence[DataFile]]
    tensors: Sequence[tuple[str, str]]
    pieces: Sequence[FileRange]
    crossings: Sequence[Crossing]
    replicas: Mapping[tuple[int, ...], Sequence[ReplicatedShard]]
    exchanges: bool

    @property
    def nbytes(self) -> int:
        """The bytes that this rank writes."""
        stripes = (crossing.pieces for crossing in self.crossings if isinstance(crossing, OwnedStripe))
        return count_bytes(self.pieces) + sum(count_bytes(pieces) for pieces in stripes)


class TensorSpan(NamedTuple):
    """Bytes ``[start, stop)`` of a tensor as ranks hold it, where they are stored.

    They are those of stored tensor number ``tensor`` from byte ``at`` on, from byte ``offset`` on of file number
    ``file``.
    """

    start: int
    stop: int
    tensor: int
    at: int
    file: int
    offset: int


#: The plan of a save of nothing.
NOTHING = SavePlan((), {}, (), (), (), {}, exchanges=False)


def plan_save(membership: GlobalSpec, rank: int, limit: int) -> SavePlan:
    """The plan of ``rank``; the files in it are equal for every rank. ``limit``: the most bytes of tensors in one."""
    held = {(tensor.group, tensor.name): tensor for tensor in membership.tensors()}
    groups = _pack(held, membership.tied(), limit)
    files = [file for group in groups.values() for file in group]
    names = [(group, name) for group, shelf in groups.items() for file in shelf for name in file.entries]
    starts = [
        (number, file.data_start + entry.data_offsets[0])
        for number, file in enumerate(files)
        for entry in file.entries.values()
    ]
    homes = {key: (tensor, *start) for tensor, (key, start) in enumerate(zip(names, starts, strict=True))}
    sources = {
        (key[0], name): key for key, one in held.items() for name in stored_tensors(key[1], one.info, one.splits)
    }
    own = _Share(rank)
    for key in dict.fromkeys(sources[name] for name in names):
        own.add(held[key], _stretches(held[key], homes))
    return SavePlan(files, groups, names, own.pieces(), own.crossings, own.replicas, _exchanges(held))


def _stretches(held: GlobalTensor, homes: Mapping[tuple[str, str], tuple[int, int, int]]) -> list[TensorSpan]:
    """Where the bytes of a tensor go. ``homes`` are the number, file and offset of each stored tensor."""
    if not held.splits:
        tensor, file, offset = homes[held.group, held.name]
        return [TensorSpan(0, held.info.nbytes, tensor, 0, file, offset)]
    found = []
    for (start, stop), name, at in split_ranges(held.info, held.splits):
        tensor, file, offset = homes[held.group, name]
        found.append(TensorSpan(start, stop, tensor, at, file, offset + at))
    return sorted(found)


def plan_into_files(
    membership: GlobalSpec,
    rank: int,
    names: Sequence[tuple[str, str]],
    places: Mapping[tuple[str, str], Sequence[TensorSpan]],
) -> SavePlan:
    """The plan of ``rank`` for files that somebody else has laid out. ``names`` are the stored tensors by number.

    ``places`` tells where the bytes of each tensor that ranks hold go, in an order that is the same on all ranks; they
    may be several stored tensors, and one may be stored twice.
    """
    held = {(tensor.group, tensor.name): tensor for tensor in membership.tensors()}
    own = _Share(rank)
    for key, stretches in sorted(places.items(), key=_in_files):
        own.add(held[key], stretches)
    return SavePlan((), {}, names, own.pieces(), own.crossings, own.replicas, _exchanges(held))


def _in_files(place: tuple[tuple[str, str], Sequence[TensorSpan]]) -> list[tuple[int, int]]:
    return [(one.file, one.offset) for one in place[1]]


def _exchanges(held: Mapping[tuple[str, str], GlobalTensor]) -> bool:
    return any(is_striped(tensor) for tensor in held.values())


def _pack(
    held: Mapping[tuple[str, str], GlobalTensor], tied: Mapping[str, Mapping[str, str]], limit: int
) -> dict[str, list[DataFile]]:
    infos: dict[str, dict[str, TensorInfo]] = {}
    for (group, name), tensor in held.items():
        for key, info in stored_tensors(name, tensor.info, tensor.splits).items():
            if key in infos.setdefault(group, {}):
                raise StateError(f"two {group} tensors would be stored under the name {key!r}")
            infos[group][key] = info
    return {group: pack_files(group, tensors, tied.get(group, {}), limit) for group, tensors in sorted(infos.items())}


def _writers(held: GlobalTensor, coordinate: Coordinate) -> tuple[int, ...]:
    """The holders of a part whose value counts."""
    holders = held.holders(coordinate)
    return holders if held.shared else holders[:1]


def _pieces(stretches: Sequence[TensorSpan], start: int, stop: int) -> Iterator[FileRange]:
    """Where bytes ``[start, stop)`` of a tensor are stored. ``stretches`` are in the order of their ends, too."""
    for one in stretches[bisect_right(stretches, start, key=_end) :]:
        if one.start >= stop:
            break
        low, high = max(start, one.start), min(stop, one.stop)
        if low < high:
            skip = low - one.start
            yield FileRange(
                one.tensor, one.at + skip, one.at + skip + high - low, low - start, one.file, one.offset + skip
            )


def _end(stretch: TensorSpan) -> int:
    return stretch.stop


class _Share:
    """Collects what one rank writes, passes on and proves."""

    def __init__(self, rank: int) -> None:
        self._rank, self._routes = rank, StripeRoutes(rank, _writers)
        self._held: dict[tuple[int, ...], list[FileRange]] = {}
        self.crossings: list[Crossing] = []
        self.replicas: dict[tuple[int, ...], list[ReplicatedShard]] = {}

    def add(self, held: GlobalTensor, stretches: Sequence[TensorSpan]) -> None:
        """Take note of one tensor."""
        if not stretches:
            return
        tensor = stretches[0].tensor
        coordinate = held.coordinate(self._rank)
        if coordinate is None:
            return
        mine, holders = local_shard(held.info, held.division, coordinate), held.holders(coordinate)
        if held.shared and len(holders) > 1 and mine.nbytes:
            self.replicas.setdefault(holders, []).append(ReplicatedShard(tensor, mine.nbytes))

        def locate(start: int, stop: int) -> list[FileRange]:
            return list(_pieces(stretches, start, stop))

        writers = _writers(held, coordinate)
        if is_striped(held):
            self._cross(held, locate)
        elif self._rank in writers:
            self._held.setdefault(writers, []).extend(contiguous_requests(mine, locate))

    def _cross(self, held: GlobalTensor, locate: Locate) -> None:
        """The stripes that this rank owns, and those that it is the one to give its cut to."""
        self.crossings += (
            crossing
            for crossing in self._routes.crossings(held, locate)
            if isinstance(crossing, OwnedStripe) or crossing.cut.source == self._rank
        )

    def pieces(self) -> list[FileRange]:
        """What this rank writes as it lies, in the order of the files."""
        return sorted(
            (
                piece
                for holders, pieces in self._held.items()
                for piece in split_evenly(sorted(pieces, key=_place), holders.index(self._rank), len(holders))
                if piece.start < piece.stop
            ),
            key=_place,
        )


def _place(piece: FileRange) -> tuple[int, int]:
    return piece.file, piece.offset
