"""A tensor that is stored in chunks. Each chunk is located in its file when it is first read.

Readers of DCP, Megatron and NxD have such tensors, on each rank of a load or conversion. The extents must have the same
source objects each time: loads number files by them.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter

from rankless.engine.io.tensor_sources import ChunkedSource, SourceChunk
from rankless.engine.plan.element_ranges import IndexBox
from rankless.formats.reader import FileExtent
from rankless.formats.stored_tensor import StoredTensor
from rankless.formats.tiling import contiguous_range
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.dtypes import dtype_width


@dataclass(frozen=True, eq=False)
class ChunkedTensor(StoredTensor):
    """A tensor that is stored in chunks, which tile it."""

    info: TensorInfo
    chunks: tuple[SourceChunk, ...]

    @property
    def identity(self) -> Hashable:
        """See :class:`rankless.formats.stored_tensor.StoredTensor`. Tied tensors share their chunks."""
        return (self.info, tuple(chunk.order_hint for chunk in self.chunks)) if self.chunks else id(self)

    @cached_property
    def _extents(self) -> Sequence[FileExtent]:
        """One extent for each chunk; or one for the whole tensor, if a chunk is not contiguous."""
        width = dtype_width(self.info.dtype)
        ranges = [contiguous_range(chunk.box, self.info.shape) for chunk in self.chunks]
        if any(elements is None for elements in ranges):
            return [FileExtent(ChunkedSource(self.info.shape, width, self.chunks), 0, 0, self.info.nbytes)]
        extents = [
            FileExtent(_single_chunk_source(chunk, width), 0, elements.start * width, elements.stop * width)
            for chunk, elements in zip(self.chunks, ranges, strict=True)
            if elements is not None
        ]
        return sorted(extents, key=itemgetter(2))

    def find_extents(self, start: int, stop: int) -> Sequence[FileExtent]:
        """See :class:`rankless.formats.stored_tensor.StoredTensor`."""
        extents = []
        number = bisect.bisect_right(self._extents, start, key=itemgetter(2)) - 1
        while start < stop:
            stored = self._extents[number]
            end = min(stop, stored.stop)
            extents.append(FileExtent(stored.file, start - stored.start, start, end))
            start, number = end, number + 1
        return extents


def _single_chunk_source(chunk: SourceChunk, width: int) -> ChunkedSource:
    """Return a chunk as a tensor of its own."""
    whole = IndexBox((0,) * len(chunk.box.shape), chunk.box.shape)
    return ChunkedSource(chunk.box.shape, width, (SourceChunk(whole, lambda: chunk.location, chunk.order_hint),))
