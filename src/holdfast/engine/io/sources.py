"""What tensors are read from, beside plain ranges of files: boxes that lie in several files, or in another order.

Such a tensor is described so that it reads like a file that holds nothing else, whole and row-major.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from holdfast.engine.plan.ranges import IndexBox


class StridedLocation(NamedTuple):
    """Where a box lies in a file. Its element (i, j, …) is at ``offset + i * strides[0] + j * strides[1] + …``.

    ``strides`` are in bytes, and none is negative.
    """

    file: Path
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class SourceChunk:
    """A box of a tensor, which is looked for when it is first read. ``find`` raises ``CorruptCheckpointError``.

    It is ``near`` an offset of a file, for those who read in order.
    """

    box: IndexBox
    find: Callable[[], StridedLocation]
    near: tuple[Path, int]

    @cached_property
    def place(self) -> StridedLocation:
        """Where it lies."""
        return self.find()


@dataclass(frozen=True, eq=False)
class ChunkedSource:
    """A tensor of ``shape``, with elements of ``width`` bytes, that is made up of boxes."""

    shape: tuple[int, ...]
    width: int
    parts: tuple[SourceChunk, ...]


@dataclass(frozen=True, eq=False)
class InMemorySource:
    """Bytes that are here already."""

    data: bytes


#: What is read from by ranges of bytes.
Source = Path | ChunkedSource | InMemorySource


def row_major_strides(shape: tuple[int, ...], width: int) -> tuple[int, ...]:
    """The strides in bytes of elements that lie one after another."""
    strides = []
    for size in reversed(shape):
        strides.append(width)
        width *= size
    return tuple(reversed(strides))


def is_row_major(shape: tuple[int, ...], strides: tuple[int, ...], width: int) -> bool:
    """Whether elements with such strides lie one after another. A dimension of one index may have any stride."""
    expected = row_major_strides(shape, width)
    return 0 in shape or all(
        size == 1 or one == other for size, one, other in zip(shape, strides, expected, strict=True)
    )
