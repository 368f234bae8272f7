"""Reading from files, and from what reads like a file: by ranges of bytes, by several threads."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.engine.io.sources import (
    ChunkedSource,
    InMemorySource,
    Source,
    SourceChunk,
    StridedLocation,
    is_row_major,
)
from holdfast.engine.plan.ranges import IndexBox, boxes_of_range
from holdfast.storage.closing import ClosingMixin
from holdfast.storage.direct_io import BufferedReader
from holdfast.storage.reader_pool import ReaderPool

#: The most bytes that are read at once to pick some out of them.
_SLAB = 4 * 2**20

#: So many bytes are read at once whatever is wanted of them; of more, at least one in so many must be.
_SMALL, _SPARSE = 64 * 2**10, 4

_Elements = npt.NDArray[Any]


class SourceReader(ClosingMixin):
    """What is read from, by number; a context manager that closes all files at its end."""

    def __init__(self, sources: Sequence[Source], opened: Callable[[Path], BufferedReader] = BufferedReader) -> None:
        """``opened`` says how files are read."""
        self._sources, self._readers = sources, ReaderPool(opened)

    def read(self, number: int, offset: int, into: memoryview) -> None:
        """Fill ``into`` from ``offset`` bytes on, both whole elements. Raises ``CorruptCheckpointError`` where a file ends."""
        source = self._sources[number]
        if isinstance(source, ChunkedSource):
            _read_woven(source, offset, into, self._readers)
        elif isinstance(source, InMemorySource):
            into[:] = source.data[offset : offset + len(into)]
        else:
            self._readers.read(source, offset, into)

    def read_in_parts(self, number: int, offset: int, into: memoryview) -> Iterator[memoryview]:
        """The same; gives each part of ``into``, in order, when it has just been filled."""
        source = self._sources[number]
        if isinstance(source, Path):
            yield from self._readers.read_in_parts(source, offset, into)
        else:
            self.read(number, offset, into)
            yield into

    def close(self) -> None:
        """Close all files."""
        self._readers.close()


def _read_woven(woven: ChunkedSource, offset: int, into: memoryview, readers: ReaderPool) -> None:
    if len(woven.parts) == 1 and is_row_major(woven.shape, woven.parts[0].place.strides, woven.width):
        place = woven.parts[0].place
        readers.read(place.file, place.offset + offset, into)
        return
    elements = np.frombuffer(into, f"u{woven.width}")
    done = 0
    for box in boxes_of_range(woven.shape, offset // woven.width, (offset + len(into)) // woven.width):
        size = math.prod(box.shape)
        for part in woven.parts:
            _read_common(part, box, elements[done : done + size].reshape(box.shape), readers)
        done += size


def _read_common(part: SourceChunk, box: IndexBox, out: _Elements, readers: ReaderPool) -> None:
    """Read what a part has of a box."""
    starts = tuple(map(max, part.box.offset, box.offset))
    stops = tuple(min(a + b, c + d) for a, b, c, d in zip(*part.box, *box, strict=True))
    if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
        return
    inside = tuple(slice(a - c, b - c) for a, b, c in zip(starts, stops, box.offset, strict=True))
    skipped = (a - b for a, b in zip(starts, part.box.offset, strict=True))
    offset = part.place.offset + sum(map(operator.mul, skipped, part.place.strides))
    _read_strided(part.place._replace(offset=offset), out[inside] if inside else out, readers)


def _read_strided(place: StridedLocation, out: _Elements, readers: ReaderPool) -> None:
    """Read elements that lie apart, in as few reads as is quick."""
    reach = [(size - 1) * stride for size, stride in zip(out.shape, place.strides, strict=True)]
    span = sum(reach) + out.itemsize
    if span > _SLAB or span > max(_SMALL, _SPARSE * out.nbytes):
        axis = max(range(out.ndim), key=reach.__getitem__)
        half = out.shape[axis] // 2
        low, high = np.split(out, [half], axis)
        _read_strided(place, low, readers)
        _read_strided(place._replace(offset=place.offset + half * place.strides[axis]), high, readers)
        return
    raw = np.empty(span, np.uint8)
    readers.read(place.file, place.offset, raw.data)
    np.copyto(out, np.ndarray(out.shape, out.dtype, raw.data, 0, place.strides))
