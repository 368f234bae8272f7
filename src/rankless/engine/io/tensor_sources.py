"""Sources of tensors other than plain file ranges: boxes that are in several files, not in row-major order, or changed.

Such a tensor is described so that it can be read like a file that contains only this tensor, in row-major order.

The readers in ``formats/`` and of frameworks return them as locations of tensors, on each rank, and
:mod:`rankless.engine.io.source_reader` reads them. Plans of loads number the sources: a reader must return the same
object for the same tensor, because only paths are compared by value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from rankless.engine.plan.element_ranges import IndexBox

if TYPE_CHECKING:
    from rankless.storage.reader_pool import ReaderPool


class StridedLocation(NamedTuple):
    """The location of a box in a file: element (i, j, …) is at ``offset + i * strides[0] + j * strides[1] + …``.

    ``strides`` are in bytes, and none is negative.
    """

    file: Path
    offset: int
    strides: tuple[int, ...]


class SourceChunk(msgspec.Struct, frozen=True, dict=True):
    """A box of a tensor, which is located when it is first read. ``locate`` raises ``CorruptCheckpointError``.

    ``order_hint`` is a file and an approximate offset, for reading in order.
    """

    box: IndexBox
    locate: Callable[[], StridedLocation]
    order_hint: tuple[Path, int]

    @cached_property
    def location(self) -> StridedLocation:
        """The location in a file."""
        return self.locate()


class ChunkedSource(msgspec.Struct, frozen=True, eq=False):
    """A tensor of ``shape``, with elements of ``width`` bytes, that consists of boxes."""

    shape: tuple[int, ...]
    width: int
    chunks: tuple[SourceChunk, ...]


class InMemorySource(msgspec.Struct, frozen=True, eq=False):
    """Bytes that are already in memory."""

    data: bytes


class SourceLayer(Protocol):
    """Changes of a tensor that are stored apart from it."""

    def apply(self, offset: int, data: memoryview, readers: ReaderPool) -> None:
        """Change ``data``, the bytes of the tensor from ``offset`` on, in place. It reads with ``readers``."""


class LayeredSource(msgspec.Struct, frozen=True, eq=False):
    """A tensor that begins at ``offset`` in ``file``, and the changes to it, in order."""

    file: Path
    offset: int
    layers: tuple[SourceLayer, ...]

    def __repr__(self) -> str:
        """Return the path of the file, for messages."""
        return str(self.file)

    def read(self, offset: int, into: memoryview, readers: ReaderPool) -> None:
        """Fill ``into`` with the bytes of the changed tensor from ``offset`` on."""
        readers.read(self.file, self.offset + offset, into)
        for layer in self.layers:
            layer.apply(offset, into, readers)


class ComputedSource(msgspec.Struct, frozen=True, eq=False):
    """A tensor that is computed from the bytes of others: ``compute(offset, into, readers)`` fills a buffer.

    ``label`` names it in messages.
    """

    compute: Callable[[int, memoryview, ReaderPool], None]
    label: str

    def __repr__(self) -> str:
        """Return the label."""
        return self.label

    def read(self, offset: int, into: memoryview, readers: ReaderPool) -> None:
        """Fill ``into`` with the bytes from ``offset`` on. It reads with ``readers``."""
        self.compute(offset, into, readers)


#: Anything that byte ranges are read from.
Source = Path | ChunkedSource | InMemorySource | LayeredSource | ComputedSource


def paths_of(sources: Iterable[Source]) -> Iterator[Path]:
    """Yield the files that sources are read from."""
    for source in sources:
        if isinstance(source, Path):
            yield source
        elif isinstance(source, LayeredSource):
            yield source.file
        elif isinstance(source, ChunkedSource):
            yield from (chunk.order_hint[0] for chunk in source.chunks)


def row_major_strides(shape: tuple[int, ...], width: int) -> tuple[int, ...]:
    """Return the strides in bytes of contiguous elements in row-major order.

    For example, the shape ``(2, 3)`` with a ``width`` of 4 bytes has the strides ``(12, 4)``.
    """
    strides = []
    for size in reversed(shape):
        strides.append(width)
        width *= size
    return tuple(reversed(strides))


def order_dimensions(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Return the dimensions of more than one element from the outermost to the innermost, then the others.

    A DTensor has the strides of the whole tensor, which do not depend on the ranks. For example, the strides ``(1, 3)``
    of a tensor of shape ``(3, 4)`` give ``[1, 0]``.
    """
    return sorted(range(len(shape)), key=lambda dim: (shape[dim] <= 1, -strides[dim] if shape[dim] > 1 else 0, dim))


def is_row_major(shape: tuple[int, ...], strides: tuple[int, ...], width: int) -> bool:
    """Return whether elements with such strides are contiguous. A dimension of one index may have any stride."""
    expected = row_major_strides(shape, width)
    return 0 in shape or all(
        size == 1 or stride == expected_stride
        for size, stride, expected_stride in zip(shape, strides, expected, strict=True)
    )
