"""Joining the flat tensors of the data-parallel ranks to master weights and optimizer states of whole parameters.

:mod:`rankless.deepspeed.reader.pipeline_stages` calls it on each rank that opens a checkpoint with an optimizer.
Parameters lie in the flat tensors as DeepSpeed places them: a wrong place would give a parameter elements of another.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rankless.deepspeed.reader.concatenated_tensor import check_ranks, concatenate_ranks
from rankless.deepspeed.reader.joined_optimizer import JoinedOptimizer
from rankless.deepspeed.reader.rank_optimizer import RankOptimizer
from rankless.deepspeed.reader.zero_partitions import (
    PlacedParameter,
    Shapes,
    align_elements,
    count_elements,
    place_in_group,
    place_in_sub_group,
    share_size,
)
from rankless.errors import CorruptCheckpointError, FormatError
from rankless.formats.stored_tensor import StoredTensor, UnreadableTensor
from rankless.ondisk.read_budget import ReadBudget
from rankless.storage.reader_pool import ReaderPool

#: The number of an expert in a parameter's name.
_EXPERT = re.compile(r"(?P<prefix>.*deepspeed_experts\.)(?P<number>\d{1,6})(?P<suffix>\..*)", re.ASCII)

#: Units of work for a state of a parameter.
_STATE = 24


class _FlatGroup(NamedTuple):
    """A group, or a sub-group of ZeRO-3, on the ranks that share it."""

    number: int
    shapes: Shapes
    ranks: Sequence[RankOptimizer]

    @property
    def paths(self) -> list[Path]:
        """The files of the ranks."""
        return [rank.path for rank in self.ranks]


def join_optimizers(
    ranks: Sequence[RankOptimizer], shape_groups: Sequence[Shapes], budget: ReadBudget
) -> JoinedOptimizer:
    """Join the optimizers of all data-parallel ranks, in their order.

    Raises ``CorruptCheckpointError`` naming a file that does not fit the others.
    """
    return _OptimizerJoiner(ranks, shape_groups, budget).join()


class _OptimizerJoiner:
    def __init__(self, ranks: Sequence[RankOptimizer], shape_groups: Sequence[Shapes], budget: ReadBudget) -> None:
        self._ranks, self._first, self._budget = ranks, ranks[0], budget
        self._shape_groups = shape_groups
        self._joined = JoinedOptimizer(values=dict(self._first.values))
        self._readers = ReaderPool()
        self._check_ranks()

    def join(self) -> JoinedOptimizer:
        names_by_number = [self._join_number(number) for number in range(len(self._first.masters))]
        for settings, members in zip(self._first.groups, self._first.members, strict=True):
            names = [name for number in members for name in names_by_number[number]]
            self._joined.groups.append({**settings, "params": names})
        return self._joined

    def _check_ranks(self) -> None:
        first = self._first
        if len(first.masters) != len(self._shape_groups):
            raise CorruptCheckpointError(
                f"{first.path} has {len(first.masters)} flat tensors, and param_shapes in the file of the model has "
                f"{len(self._shape_groups)} groups: the files are from two saves"
            )
        for rank in self._ranks[1:]:
            same = ("is_stage3", "members", "partition_counts", "paddings")
            differs = next((name for name in same if getattr(rank, name) != getattr(first, name)), None)
            if differs is not None or len(rank.masters) != len(first.masters):
                raise CorruptCheckpointError(
                    f"{rank.path} has other {differs or 'flat tensors'} than {first.path}: the files are from two saves"
                )

    def _join_number(self, number: int) -> list[str]:
        """Join one group or sub-group, and return the names of its parameters."""
        names: list[str] = []
        for group in self._divide_ranks(number):
            placed = list(self._place_parameters(group))
            names += [parameter.name for parameter in placed]
            masters = [rank.masters[number] for rank in group.ranks]
            self._check_flat(group, placed, masters, "the master weights")
            for parameter in placed:
                self._joined.masters[parameter.name] = concatenate_ranks(parameter, masters)
            self._join_states(group, placed)
        return names

    def _divide_ranks(self, number: int) -> Iterator[_FlatGroup]:
        """Yield the group once, or once for each set of ranks that has experts of its own."""
        shapes, count, ranks = self._shape_groups[number], self._first.partition_counts[number], self._ranks
        if count == len(ranks):
            yield _FlatGroup(number, shapes, ranks)
            return
        if self._first.is_stage3 or not self._first.groups[number].get("moe") or len(ranks) % count:
            raise CorruptCheckpointError(
                f"{self._first.path} says that {count} ranks share its group {number}, and there are files of "
                f"{len(ranks)}: files are missing, or left from an earlier save by another number of ranks. Remove "
                "those of the earlier save"
            )
        sets = len(ranks) // count
        for expert_rank in range(sets):
            yield _FlatGroup(number, _number_experts(shapes, expert_rank), ranks[expert_rank::sets])

    def _place_parameters(self, group: _FlatGroup) -> Iterator[PlacedParameter]:
        """Yield the location of each parameter, after a check that the sizes fit."""
        sizes = [rank.masters[group.number].info.shape[0] for rank in group.ranks]
        if self._first.is_stage3:
            share = sum(share_size(shape, len(sizes)) for shape in group.shapes.values())
            self._check_sizes(group, sizes, [share] * len(sizes))
            return place_in_sub_group(group.shapes, len(sizes), self._budget)
        paddings = self._paddings_of(group)
        total, tail = count_elements(group.shapes, paddings), self._tail_of(group)
        expected = {total, align_elements(total, len(sizes)), total + tail}
        if sum(sizes) not in expected:
            self._check_sizes(group, [sum(sizes)], [total])
        return place_in_group(group.shapes, paddings, max(sizes), self._budget)

    def _paddings_of(self, group: _FlatGroup) -> Sequence[int]:
        paddings = self._first.paddings[group.number] if self._first.paddings else [0] * len(group.shapes)
        if len(paddings) != len(group.shapes):
            raise CorruptCheckpointError(
                f"{self._first.path}: param_alignment_paddings of group {group.number} has {len(paddings)} entries for "
                f"{len(group.shapes)} parameters"
            )
        return paddings

    def _tail_of(self, group: _FlatGroup) -> int:
        """Return the padding at the end of the parts of all ranks."""
        return sum(rank.tail_paddings[group.number] for rank in group.ranks if rank.tail_paddings)

    def _check_sizes(self, group: _FlatGroup, sizes: Sequence[int], expected: Sequence[int]) -> None:
        for size, needed, rank in zip(sizes, expected, group.ranks, strict=False):
            if size == 0 < needed:
                raise FormatError(
                    f"{rank.path} has no master weights of group {group.number}: the optimizer was offloaded to NVMe, "
                    "and its state is in swap files that rankless does not read. Save without "
                    "offload_optimizer to nvme"
                )
            if size != needed:
                raise CorruptCheckpointError(
                    f"{rank.path}: the flat tensors of group {group.number} have {size} elements, but the shapes of "
                    f"its parameters need {needed}: files are from two saves, or the layout is not DeepSpeed's"
                )

    def _join_states(self, group: _FlatGroup, placed: Sequence[PlacedParameter]) -> None:
        tables = [rank.states[group.number] for rank in group.ranks]
        for rank, table in zip(group.ranks, tables, strict=True):
            if table.keys() != tables[0].keys():
                raise CorruptCheckpointError(
                    f"{rank.path} has other states of group {group.number} than {group.ranks[0].path}: the files are "
                    "from two saves"
                )
        for name in tables[0]:
            values = [table[name] for table in tables]
            is_divided = self._is_divided(group, values)
            if is_divided:
                self._check_flat(group, placed, values, f"the state {name!r:.100}")
            shared = None if is_divided else self._require_equal(group, name, values)
            self._budget.spend(_STATE * len(placed))
            for parameter in placed:
                value = concatenate_ranks(parameter, values) if is_divided else shared
                self._joined.states.setdefault(parameter.name, {})[name] = value

    def _check_flat(
        self, group: _FlatGroup, placed: Sequence[PlacedParameter], tensors: Sequence[StoredTensor], subject: str
    ) -> None:
        """Check that the flat tensors of all ranks have the elements of all parameters."""
        if self._first.is_stage3 or not placed:
            needed = [sum(parameter.part for parameter in placed)] * len(tensors)
        else:
            part, total = placed[0].part, placed[-1].first + math.prod(placed[-1].shape)
            needed = [max(0, min(part, total - rank * part)) for rank in range(len(tensors))]
        check_ranks(tensors, group.paths, needed, f"{subject} of group {group.number}")

    def _is_divided(self, group: _FlatGroup, values: Sequence[Any]) -> bool:
        """Return whether a state is a flat tensor, with or without the padding that the master weights lack."""
        if not all(isinstance(value, StoredTensor) and len(value.info.shape) == 1 for value in values):
            return False
        sizes = [rank.masters[group.number].info.shape[0] for rank in group.ranks]
        actual = [value.info.shape[0] for value in values]
        if actual == sizes or self._first.is_stage3:
            return actual == sizes
        part = align_elements(count_elements(group.shapes, self._paddings_of(group)), len(sizes)) // len(sizes)
        return all(size in {part, max(sizes)} for size in actual)

    def _require_equal(self, group: _FlatGroup, name: str, values: Sequence[Any]) -> Any:
        """Return a state that is not divided: all ranks must have the same."""
        first = values[0]
        if all(isinstance(value, StoredTensor) and value.info == first.info for value in values):
            if first.info.shape:
                return UnreadableTensor("is not divided as its parameters are, so it is unknown how to join it")
            if any(self._read_scalar(value) != self._read_scalar(first) for value in values[1:]):
                raise self._differ_error(group, name)
            return first
        if any(isinstance(value, StoredTensor | UnreadableTensor) for value in values):
            return UnreadableTensor("is not divided as its parameters are, so it is unknown how to join it")
        if any(type(value) is not type(first) or value != first for value in values):
            raise self._differ_error(group, name)
        return first

    def _read_scalar(self, stored: StoredTensor) -> bytes:
        """Return the bytes of a tensor without dimensions. Comparing steps finds files of two saves when they open."""
        (extent,) = stored.find_extents(0, stored.info.nbytes)
        if not isinstance(extent.file, Path):
            raise FormatError(f"{self._first.path}: a state without dimensions is not stored as a tensor")
        buffer = bytearray(stored.info.nbytes)
        self._readers.read(extent.file, extent.offset, memoryview(buffer))
        return bytes(buffer)

    @staticmethod
    def _differ_error(group: _FlatGroup, name: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{group.ranks[0].path}: the state {name!r:.100} of group {group.number} is not that of the other ranks: "
            "the files are from two saves"
        )


def _number_experts(shapes: Shapes, expert_rank: int) -> Shapes:
    """Return the shapes of the experts of an expert-parallel rank by their names in the model.

    Names in the optimizer count over the experts of one rank, names in the model over the experts of all ranks. For
    example, with two experts for each rank, rank 1's expert 0 is expert 2 of the model.
    """
    numbers: dict[str, set[str]] = {}
    for match in map(_EXPERT.fullmatch, shapes):
        if match is not None:
            numbers.setdefault(match["prefix"], set()).add(match["number"])
    return {_rename_expert(name, numbers, expert_rank): shape for name, shape in shapes.items()}


def _rename_expert(name: str, numbers: Mapping[str, set[str]], expert_rank: int) -> str:
    match = _EXPERT.fullmatch(name)
    if match is None:
        raise FormatError(
            f"the parameter {name!r:.100} is divided among ranks as an expert, but its name has no number of an expert"
        )
    number = expert_rank * len(numbers[match["prefix"]]) + int(match["number"])
    return f"{match['prefix']}{number}{match['suffix']}"
