"""A tensor that lies in chunks, each of which is looked for when it is first read."""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter

from holdfast.engine.runs import Box
from holdfast.engine.woven import Part, Woven
from holdfast.formats.arrange.stored import Stored
from holdfast.formats.dcp.tiling import run_of
from holdfast.formats.reader import Extent
from holdfast.layout.dtypes import width
from holdfast.layout.files import TensorInfo


@dataclass(frozen=True, eq=False)
class Chunked(Stored):
    """A tensor of chunks that tile it."""

    info: TensorInfo
    parts: tuple[Part, ...]

    @property
    def identity(self) -> Hashable:
        """See :class:`holdfast.formats.arrange.stored.Stored`. torch stores tied weights twice; we need not."""
        return (self.info, tuple(part.near for part in self.parts)) if self.parts else id(self)

    @cached_property
    def _rows(self) -> Sequence[Extent]:
        """The chunks as ranges of the tensor's bytes; all of it together where they are interleaved."""
        size = width(self.info.dtype)
        runs = [run_of(part.box, self.info.shape) for part in self.parts]
        if any(run is None for run in runs):
            return [Extent(Woven(self.info.shape, size, self.parts), 0, 0, self.info.nbytes)]
        rows = [
            Extent(_alone(part, size), 0, run.start * size, run.stop * size)
            for part, run in zip(self.parts, runs, strict=True)
            if run is not None
        ]
        return sorted(rows, key=itemgetter(2))

    def extents(self, start: int, stop: int) -> Sequence[Extent]:
        """See :class:`holdfast.formats.arrange.stored.Stored`."""
        found = []
        at = bisect.bisect_right(self._rows, start, key=itemgetter(2)) - 1
        while start < stop:
            row = self._rows[at]
            end = min(stop, row.stop)
            found.append(Extent(row.file, start - row.start, start, end))
            start, at = end, at + 1
        return found


def _alone(part: Part, size: int) -> Woven:
    """A chunk as a tensor of its own."""
    whole = Box((0,) * len(part.box.shape), part.box.shape)
    return Woven(part.box.shape, size, (Part(whole, lambda: part.place, part.near),))
