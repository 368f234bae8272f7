"""Reading of byte ranges from files and file-like sources by several threads.

All reads of tensor data go through it: the reads of loads, of the view, of conversions and verifications, and of
foreign formats, on each rank for itself.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rankless.engine.io.tensor_sources import (
    ChunkedSource,
    ComputedSource,
    InMemorySource,
    LayeredSource,
    Source,
    SourceChunk,
    StridedLocation,
    is_row_major,
)
from rankless.engine.plan.element_ranges import IndexBox, boxes_of_range
from rankless.storage.closing import ClosingMixin
from rankless.storage.reader_pool import ReaderPool

#: The most bytes that are read at once if only some of them are needed.
_MAX_SPAN = 4 * 2**20

#: A read of up to ``_SMALL`` bytes may contain any number of needed ones; of more, at least one in ``_SPARSE`` must be.
_SMALL, _SPARSE = 64 * 2**10, 4

_Elements = npt.NDArray[Any]


class SourceReader(ClosingMixin):
    """A reader of sources by number. As a context manager it closes all files at its end."""

    def __init__(self, sources: Sequence[Source], readers: ReaderPool | None = None) -> None:
        """Create the reader. It opens and closes the files with ``readers``."""
        self._sources, self._readers = sources, ReaderPool() if readers is None else readers

    def read(self, number: int, offset: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes from ``offset`` on. Offset and length are whole elements.

        Raises ``CorruptCheckpointError`` if the file ends before.
        """
        source = self._sources[number]
        if isinstance(source, ChunkedSource):
            _read_chunked(source, offset, into, self._readers)
        elif isinstance(source, InMemorySource):
            into[:] = source.data[offset : offset + len(into)]
        elif isinstance(source, LayeredSource | ComputedSource):
            source.read(offset, into, self._readers)
        else:
            self._readers.read(source, offset, into)

    def read_in_chunks(self, number: int, offset: int, into: memoryview) -> Iterator[memoryview]:
        """Read like :meth:`read`, and yield each part of ``into``, in order, as soon as it has been filled."""
        source = self._sources[number]
        if isinstance(source, Path):
            yield from self._readers.read_in_chunks(source, offset, into)
        else:
            self.read(number, offset, into)
            yield into

    def close(self) -> None:
        """Close all files."""
        self._readers.close()


def _read_chunked(source: ChunkedSource, offset: int, into: memoryview, readers: ReaderPool) -> None:
    if len(source.chunks) == 1 and is_row_major(source.shape, source.chunks[0].location.strides, source.width):
        location = source.chunks[0].location
        readers.read(location.file, location.offset + offset, into)
        return
    elements = np.frombuffer(into, f"u{source.width}")
    done = 0
    for box in boxes_of_range(source.shape, offset // source.width, (offset + len(into)) // source.width):
        size = math.prod(box.shape)
        for chunk in source.chunks:
            _read_overlap(chunk, box, elements[done : done + size].reshape(box.shape), readers)
        done += size


def _read_overlap(chunk: SourceChunk, box: IndexBox, out: _Elements, readers: ReaderPool) -> None:
    """Read the elements of a box that are in a chunk."""
    starts = tuple(map(max, chunk.box.offset, box.offset))
    stops = tuple(min(a + b, c + d) for a, b, c, d in zip(*chunk.box, *box, strict=True))
    if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
        return
    inside = tuple(slice(a - c, b - c) for a, b, c in zip(starts, stops, box.offset, strict=True))
    skipped = (a - b for a, b in zip(starts, chunk.box.offset, strict=True))
    offset = chunk.location.offset + sum(map(operator.mul, skipped, chunk.location.strides))
    _read_strided(chunk.location._replace(offset=offset), out[inside] if inside else out, readers)


def _read_strided(location: StridedLocation, out: _Elements, readers: ReaderPool) -> None:
    """Read elements that are not contiguous, in as few reads as is fast."""
    reach = [(size - 1) * stride for size, stride in zip(out.shape, location.strides, strict=True)]
    span = sum(reach) + out.itemsize
    if span > _MAX_SPAN or span > max(_SMALL, _SPARSE * out.nbytes):
        axis = max(range(out.ndim), key=reach.__getitem__)
        half = out.shape[axis] // 2
        low, high = np.split(out, [half], axis)
        _read_strided(location, low, readers)
        _read_strided(location._replace(offset=location.offset + half * location.strides[axis]), high, readers)
        return
    span_bytes = np.empty(span, np.uint8)
    readers.read(location.file, location.offset, span_bytes.data)
    np.copyto(out, np.ndarray(out.shape, out.dtype, span_bytes.data, 0, location.strides))
