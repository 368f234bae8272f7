"""The location of each parameter in the flat tensors of the data-parallel ranks. Pure functions.

ZeRO-1 and 2, and BF16_Optimizer, concatenate the parameters of a group, pad the result, and cut it into parts of equal
size, one for each rank. ZeRO-3 cuts each parameter by itself, and each rank concatenates its parts of the parameters of
a sub-group. For example, with ZeRO-1 on two ranks, parameters of 5 and 3 elements give flat tensors of 4 elements: rank
1's has the last element of the first parameter, and the second one.

The joining of optimizers and models asks it, on each rank. DeepSpeed defines the paddings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rankless.ondisk.read_budget import ReadBudget

#: Units of work for a parameter.
_PARAMETER = 8

#: The shapes of parameters by name, in the order of their elements in the flat tensor.
Shapes = Mapping[str, tuple[int, ...]]

#: The total size of a group is a multiple of this and the number of ranks.
_ALIGNMENT = 2


class PartitionPiece(NamedTuple):
    """Elements ``[start, stop)`` of the flat tensor of a rank, which are a parameter's from ``position`` on."""

    rank: int
    start: int
    stop: int
    position: int


@dataclass(frozen=True, slots=True)
class PlacedParameter:
    """A parameter with elements in the flat tensors of ranks.

    They are elements ``first`` and later of a sequence that is cut into parts of ``part`` elements, one for each rank.
    In the flat tensor of a rank, its part begins at ``offset``.
    """

    name: str
    shape: tuple[int, ...]
    first: int
    part: int
    offset: int = 0

    def find_pieces(self, start: int, stop: int) -> Iterator[PartitionPiece]:
        """Yield the pieces that elements ``[start, stop)`` of the parameter are in, in order."""
        if start >= stop:
            return
        begin, end = self.first + start, self.first + stop
        for rank in range(begin // self.part, -(-end // self.part)):
            origin = rank * self.part
            low, high = max(begin, origin), min(end, origin + self.part)
            shift = self.offset - origin
            yield PartitionPiece(rank, low + shift, high + shift, low - self.first)


def count_elements(shapes: Shapes, paddings: Sequence[int]) -> int:
    """Return the number of elements of the parameters of a group, and of the padding between them.

    For example, shapes ``(2, 3)`` and ``(4,)`` with paddings 0 and 2 have 12 elements.
    """
    return sum(map(math.prod, shapes.values())) + sum(paddings)


def align_elements(elements: int, ranks: int) -> int:
    """Return the number of elements of all ranks of a group of ZeRO-1 or 2, with the padding at its end."""
    return -(-elements // (_ALIGNMENT * ranks)) * _ALIGNMENT * ranks


def place_in_group(shapes: Shapes, paddings: Sequence[int], part: int, budget: ReadBudget) -> Iterator[PlacedParameter]:
    """Yield the parameters of a group of ZeRO-1 or 2.

    ``paddings`` are the elements of padding after each parameter, ``part`` is the number of elements of a rank.
    """
    first = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        budget.spend(_PARAMETER)
        yield PlacedParameter(name, shape, first, part)
        first += math.prod(shape) + padding


def share_size(shape: tuple[int, ...], ranks: int) -> int:
    """Return the number of elements that each rank of ZeRO-3 has of a parameter, with padding on the last ones.

    For example, 10 elements on 4 ranks are 3 for each rank, with 2 elements of padding.
    """
    return -(-math.prod(shape) // ranks)


def place_in_sub_group(shapes: Shapes, ranks: int, budget: ReadBudget) -> Iterator[PlacedParameter]:
    """Yield the parameters of a sub-group of ZeRO-3."""
    offset = 0
    for name, shape in shapes.items():
        budget.spend(_PARAMETER)
        share = share_size(shape, ranks)
        yield PlacedParameter(name, shape, 0, share, offset)
        offset += share
