"""The location of each parameter in the flat tensors of the data-parallel ranks. Pure functions.

ZeRO-1 and 2, and BF16_Optimizer, concatenate the parameters of a group, pad the result, and cut it into parts of equal
size, one for each rank. ZeRO-3 cuts each parameter by itself, and each rank concatenates its parts of the parameters of
a sub-group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.ondisk.read_budget import ReadBudget

#: Steps for a piece of a parameter.
_PIECE = 4

#: The shapes of parameters by name, in the order in which they are concatenated.
Shapes = Mapping[str, tuple[int, ...]]

#: The total size of a group is a multiple of this and the number of ranks.
_ALIGNMENT = 2


class Piece(NamedTuple):
    """Elements ``[start, stop)`` of the flat tensor of a rank."""

    rank: int
    start: int
    stop: int


@dataclass(frozen=True)
class PlacedParameter:
    """A parameter, and the pieces of flat tensors that it consists of, in order."""

    name: str
    shape: tuple[int, ...]
    pieces: Sequence[Piece]


def count_elements(shapes: Shapes, paddings: Sequence[int]) -> int:
    """Return the number of elements of the parameters of a group, and of the padding between them."""
    return sum(map(math.prod, shapes.values())) + sum(paddings)


def align_elements(elements: int, ranks: int) -> int:
    """Return the number of elements of all ranks of a group of ZeRO-1 or 2, with the padding at its end."""
    return -(-elements // (_ALIGNMENT * ranks)) * _ALIGNMENT * ranks


def place_in_group(shapes: Shapes, paddings: Sequence[int], part: int, budget: ReadBudget) -> Iterator[PlacedParameter]:
    """Yield the parameters of a group of ZeRO-1 or 2.

    ``paddings`` are the elements of padding after each parameter, ``part`` is the number of elements of a rank.
    """
    position = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        stop = position + math.prod(shape)
        pieces = list(_cut_range(position, stop, part)) if position < stop else []
        budget.spend(_PIECE * (1 + len(pieces)))
        yield PlacedParameter(name, shape, pieces)
        position = stop + padding


def _cut_range(start: int, stop: int, part: int) -> Iterator[Piece]:
    """Yield the pieces of a range of a flat tensor that is cut into parts of equal size."""
    for rank in range(start // part, -(-stop // part)):
        first = rank * part
        yield Piece(rank, max(start, first) - first, min(stop, first + part) - first)


def share_size(shape: tuple[int, ...], ranks: int) -> int:
    """Return the number of elements that each rank of ZeRO-3 has of a parameter, with padding on the last ones."""
    return -(-math.prod(shape) // ranks)


def place_in_sub_group(shapes: Shapes, ranks: int, budget: ReadBudget) -> Iterator[PlacedParameter]:
    """Yield the parameters of a sub-group of ZeRO-3."""
    offset = 0
    for name, shape in shapes.items():
        elements, share = math.prod(shape), share_size(shape, ranks)
        used = -(-elements // share) if share else 0
        budget.spend(_PIECE * (1 + used))
        pieces = [Piece(rank, offset, offset + min(share, elements - rank * share)) for rank in range(used)]
        yield PlacedParameter(name, shape, pieces)
        offset += share
