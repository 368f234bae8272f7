"""The elements of a checkpoint's tensors, read in slices of several tensors or parts of one, and verified.

Statistics and comparisons read with it, in one process. Bytes are verified before their result is used.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence

import numpy as np

from rankless.engine.integrity.block_verification import ChecksumVerifier
from rankless.engine.io.byte_sinks import MemorySink
from rankless.engine.io.read import read_file_ranges
from rankless.engine.io.requests import Fragments
from rankless.engine.io.tensor_sources import InMemorySource, Source
from rankless.engine.plan.element_ranges import TensorRange
from rankless.engine.plan.file_ranges import FileRange
from rankless.errors import CorruptCheckpointError
from rankless.formats.reader import FileExtent
from rankless.inspection.bits_to_floats import Bits
from rankless.inspection.inspected_checkpoint import InspectedCheckpoint
from rankless.inspection.placeholders import TensorPlaceholder
from rankless.inspection.tensor_pairs import Key, info_of
from rankless.ondisk.dtypes import dtype_width
from rankless.storage.aligned_memory import aligned_buffer

#: The number of elements that one thread works on at a time.
SLICE = 2**19

#: The alignment of slices in buffers, in bytes.
_ALIGNMENT = 16


def split_segments(elements: Sequence[int], dtypes: Sequence[tuple[str, ...]]) -> Iterator[list[TensorRange]]:
    """Split tensors into slices of at most ``SLICE`` elements of equal dtypes, in the order of rankless's files.

    A segment begins at a multiple of ``SLICE`` elements of its tensor. ``dtypes`` has the dtypes of all sides.
    """
    segments: list[TensorRange] = []
    filled = 0
    for tensor in sorted(range(len(elements)), key=lambda number: -dtype_width(dtypes[number][0])):
        for start in range(0, elements[tensor], SLICE):
            segment = TensorRange(tensor, start, min(elements[tensor], start + SLICE))
            if segments and (filled + segment.size > SLICE or dtypes[segments[-1].tensor] != dtypes[tensor]):
                yield segments
                segments, filled = [], 0
            segments.append(segment)
            filled += segment.size
    if segments:
        yield segments


class TensorSide:
    """The tensors of one checkpoint, by their numbers."""

    def __init__(self, target: InspectedCheckpoint, keys: Sequence[Key | None]) -> None:
        self.infos = [info for info in (info_of(target, key) for key in keys) if info is not None]
        self._sources = [key if isinstance(key, tuple) else _inline_source(key) for key in keys]
        self._reader = target.reader
        self._checks = ChecksumVerifier(target.reader, [key if isinstance(key, tuple) else ("", "") for key in keys])
        self._partial: Fragments = {}

    def read_slices(self, batch: Sequence[Sequence[TensorRange]]) -> list[Bits]:
        """Read the elements of each slice, as integers of their width. Blocks that were read whole are verified."""
        widths = [dtype_width(self.infos[segments[0].tensor].dtype) for segments in batch]
        sizes = [
            sum(segment.size for segment in segments) * width for segments, width in zip(batch, widths, strict=True)
        ]
        offsets = np.cumsum([0, *(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]).tolist()
        buffer = aligned_buffer(offsets[-1])
        sink, files = MemorySink(buffer), dict[Source, int]()
        file_ranges = [
            file_range
            for segments, at in zip(batch, offsets, strict=False)
            for file_range in self._file_ranges(segments, at, files)
        ]
        self._verify_blocks(read_file_ranges(list(files), file_ranges, lambda _: sink))
        slices = zip(offsets, sizes, widths, strict=False)
        return [buffer[at : at + size].view(f"u{width}") for at, size, width in slices]

    def _file_ranges(self, segments: Sequence[TensorRange], at: int, files: dict[Source, int]) -> Iterator[FileRange]:
        for tensor, start, stop in segments:
            width = dtype_width(self.infos[tensor].dtype)
            for extent in self._find_extents(tensor, start * width, stop * width):
                local = at + extent.start - start * width
                yield FileRange(
                    tensor, extent.start, extent.stop, local, files.setdefault(extent.file, len(files)), extent.offset
                )
            at += (stop - start) * width

    def _find_extents(self, tensor: int, start: int, stop: int) -> Sequence[FileExtent]:
        source = self._sources[tensor]
        return (
            [FileExtent(source, start, start, stop)]
            if isinstance(source, InMemorySource)
            else self._reader.find_extents(*source, start, stop)
        )

    def _verify_blocks(self, fragments: Fragments) -> None:
        stored = {
            tensor: row for tensor, row in fragments.items() if not isinstance(self._sources[tensor], InMemorySource)
        }
        for tensor, row in self._checks.verify_local(stored).items():
            self._partial.setdefault(tensor, []).extend(row)

    def verify_partial_blocks(self) -> None:
        """Verify the blocks that were read in several slices."""
        self._checks.verify_across_ranks(self._partial)


def _inline_source(key: TensorPlaceholder | None) -> InMemorySource:
    """Return the bytes of a tensor inside values. Raises ``CorruptCheckpointError`` if they are not valid."""
    if key is None:
        raise CorruptCheckpointError("a tensor inside the values is missing")
    try:
        data = base64.b64decode(key.inline, validate=True)
    except ValueError:
        data = b""
    if len(data) != key.info.nbytes:
        raise CorruptCheckpointError("a small tensor inside the values is corrupt: its size does not match its shape")
    return InMemorySource(data)
