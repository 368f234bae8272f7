"""Tensors that are not in memory: their bytes are read from a checkpoint on demand, and cast if necessary.

Conversions write from such tensors (:mod:`rankless.conversion.input_files`), on each rank its share, in the vote
"converting". Everything that is read must be added to the fragments: they are compared with the checksums of the
source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rankless.engine.io.requests import Fragments, merge_fragments
from rankless.engine.io.source_reader import SourceReader
from rankless.engine.plan.file_ranges import CHUNK
from rankless.ondisk.block_crcs import BLOCK_BYTES, Fragment, crc64
from rankless.ondisk.dtypes import dtype_width
from rankless.storage.aligned_memory import Bytes

#: The number of bytes that are cast at a time.
_CAST_BYTES = 2**20

#: Fills a buffer with elements of a dtype, given the bytes of as many of another: bytes, dtype, dtype, buffer.
CastElements = Callable[[Bytes, str, str, Bytes], None]

#: Returns the ranges of sources with bytes ``[start, stop)`` of a tensor: number of the source, offset, start and stop.
LocateInSources = Callable[[int, int], Sequence[tuple[int, int, int, int]]]


@dataclass
class ReadFragments:
    """The fragments of a checkpoint's tensors that were read, to be compared with the checksums."""

    _fragments: list[tuple[int, Fragment]] = field(default_factory=list)

    def add_bytes(self, tensor: int, start: int, data: Bytes) -> None:
        """Hash bytes from ``start`` on, which may span several blocks."""
        position = start
        while position < start + len(data):
            stop = min(start + len(data), (position // BLOCK_BYTES + 1) * BLOCK_BYTES)
            self._fragments.append((tensor, Fragment(position, stop, crc64(data[position - start : stop - start]))))
            position = stop

    def merge_all(self) -> Fragments:
        """Return all fragments by tensor, with adjacent ones merged."""
        return merge_fragments([self._fragments])


@dataclass(frozen=True)
class StreamedTensor:
    """A tensor of a checkpoint, by its number.

    ``stored`` is its dtype there, for example ``"F32"``; ``dtype`` is the dtype of the returned bytes.
    """

    tensor: int
    stored: str
    dtype: str
    locate: LocateInSources
    reader: SourceReader
    fragments_read: ReadFragments
    cast: CastElements

    @property
    def slice_bytes(self) -> int:
        """The number of bytes to copy at a time: one read of a file, unless a copy of them is needed to cast them."""
        return CHUNK if self.stored == self.dtype else _CAST_BYTES

    def view(self, start: int, stop: int) -> None:
        """Return ``None``: the bytes are not in memory."""

    def copy_out(self, start: int, into: Bytes) -> None:
        """Fill ``into`` with the bytes from ``start`` on. They may begin and end inside of elements, as cells do.

        Raises ``CorruptCheckpointError``.
        """
        if self.stored == self.dtype:
            self._read_range(start, into)
            self.fragments_read.add_bytes(self.tensor, start, into)
            return
        width, stored_width = dtype_width(self.dtype), dtype_width(self.stored)
        first, own, stop = start // width, -(-start // width), -(-(start + len(into)) // width)
        raw = np.empty((stop - first) * stored_width, np.uint8)
        self._read_range(first * stored_width, raw)
        # An element at an edge is read by two calls, but hashed only where it begins: fragments must not overlap.
        self.fragments_read.add_bytes(self.tensor, own * stored_width, raw[(own - first) * stored_width :])
        whole = len(raw) // stored_width * width == len(into)
        elements = into if whole else np.empty((stop - first) * width, np.uint8)
        self.cast(raw, self.stored, self.dtype, elements)
        if not whole:
            into[:] = elements[start - first * width :][: len(into)]

    def _read_range(self, start: int, into: Bytes) -> None:
        for number, offset, low, high in self.locate(start, start + len(into)):
            self.reader.read(number, offset, into[low - start : high - start].data)
