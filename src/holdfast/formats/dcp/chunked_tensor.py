"""A tensor that lies in chunks, each of which is looked for when it is first read."""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter

from holdfast.engine.io.sources import ChunkedSource, SourceChunk
from holdfast.engine.plan.ranges import IndexBox
from holdfast.formats.dcp.tiling import contiguous_range
from holdfast.formats.reader import FileExtent
from holdfast.formats.stored_tensor import StoredTensor
from holdfast.ondisk.dtypes import dtype_width
from holdfast.ondisk.files import TensorInfo


@dataclass(frozen=True, eq=False)
class ChunkedTensor(StoredTensor):
    """A tensor of chunks that tile it."""

    info: TensorInfo
    parts: tuple[SourceChunk, ...]

    @property
    def identity(self) -> Hashable:
        """See :class:`holdfast.formats.stored_tensor.StoredTensor`. torch stores tied weights twice; we need not."""
        return (self.info, tuple(part.near for part in self.parts)) if self.parts else id(self)

    @cached_property
    def _rows(self) -> Sequence[FileExtent]:
        """The chunks as ranges of the tensor's bytes; all of it together where they are interleaved."""
        size = dtype_width(self.info.dtype)
        runs = [contiguous_range(part.box, self.info.shape) for part in self.parts]
        if any(run is None for run in runs):
            return [FileExtent(ChunkedSource(self.info.shape, size, self.parts), 0, 0, self.info.nbytes)]
        rows = [
            FileExtent(_alone(part, size), 0, run.start * size, run.stop * size)
            for part, run in zip(self.parts, runs, strict=True)
            if run is not None
        ]
        return sorted(rows, key=itemgetter(2))

    def extents(self, start: int, stop: int) -> Sequence[FileExtent]:
        """See :class:`holdfast.formats.stored_tensor.StoredTensor`."""
        found = []
        at = bisect.bisect_right(self._rows, start, key=itemgetter(2)) - 1
        while start < stop:
            row = self._rows[at]
            end = min(stop, row.stop)
            found.append(FileExtent(row.file, start - row.start, start, end))
            start, at = end, at + 1
        return found


def _alone(part: SourceChunk, size: int) -> ChunkedSource:
    """A chunk as a tensor of its own."""
    whole = IndexBox((0,) * len(part.box.shape), part.box.shape)
    return ChunkedSource(part.box.shape, size, (SourceChunk(whole, lambda: part.place, part.near),))
