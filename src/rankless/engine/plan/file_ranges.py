"""Byte ranges in files: where the bytes of a tensor are stored, and the chunks that move them.

Saves and loads, plans and the execution of them use these types. No file range of a chunk crosses a block of its
tensor, because the files have one checksum for each block. For example, no range has the bytes on both sides of 16 MiB
in a tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from rankless.ondisk.block_crcs import BLOCK_BYTES

#: Bytes moved at a time by one thread, and the size of its buffer.
CHUNK = 4 * 2**20


class FileRange(NamedTuple):
    """Bytes ``[start, stop)`` of tensor number ``tensor`` that this rank writes or reads.

    ``local`` is the offset of these bytes in this rank's shard, and ``offset`` their offset in file number ``file``.
    """

    tensor: int
    start: int
    stop: int
    local: int
    file: int
    offset: int

    def slice_bytes(self, skip: int, size: int) -> FileRange:
        """Return ``size`` bytes of this range, after the first ``skip`` bytes."""
        return FileRange(
            self.tensor, self.start + skip, self.start + skip + size, self.local + skip, self.file, self.offset + skip
        )


def count_bytes(file_ranges: Iterable[FileRange]) -> int:
    """Return the total size of ranges in bytes."""
    return sum(file_range.stop - file_range.start for file_range in file_ranges)


class IoChunk(NamedTuple):
    """A contiguous range of one file, and the file ranges that it consists of."""

    file: int
    offset: int
    size: int
    file_ranges: Sequence[FileRange]


def file_chunks(file_ranges: Iterable[FileRange]) -> Iterator[IoChunk]:
    """Return chunks split at multiples of :data:`CHUNK` in the file: for direct writes."""
    return _group_adjacent(
        _split_at_boundaries(file_ranges, lambda file_range: file_range.offset, CHUNK),
        lambda file_range: file_range.offset % CHUNK == 0,
        CHUNK,
    )


def alternate_files(chunks: Iterable[IoChunk]) -> Iterator[IoChunk]:
    """Yield chunks of the files in turn; chunks of one file stay in order."""
    by_file: dict[int, list[IoChunk]] = {}
    for chunk in chunks:
        by_file.setdefault(chunk.file, []).append(chunk)
    turns = itertools.zip_longest(*by_file.values())
    return (chunk for turn in turns for chunk in turn if chunk is not None)


def tensor_chunks(file_ranges: Iterable[FileRange], limit: int | None = None) -> Iterator[IoChunk]:
    """Return chunks split at multiples in the tensor, so never inside an element: for reads.

    They have at most ``limit`` bytes, by default :data:`CHUNK`.
    """
    limit = CHUNK if limit is None else limit
    split = _split_at_boundaries(file_ranges, lambda file_range: file_range.start, limit)
    return _group_adjacent(split, lambda _: False, limit)


def split_at_blocks(file_range: FileRange) -> Iterator[FileRange]:
    """Yield the parts of a range in each block of its tensor.

    For example, 10 to 20 MiB of a tensor give 10 to 16 MiB and 16 to 20 MiB.
    """
    remaining = file_range
    while remaining.start < remaining.stop:
        size = min(remaining.stop - remaining.start, BLOCK_BYTES - remaining.start % BLOCK_BYTES)
        yield remaining.slice_bytes(0, size)
        remaining = remaining.slice_bytes(size, remaining.stop - remaining.start - size)


def _split_at_boundaries(
    file_ranges: Iterable[FileRange], position: Callable[[FileRange], int], limit: int
) -> Iterator[FileRange]:
    """Yield ranges that cross no multiple of ``limit`` by ``position``, and no block boundary of their tensor."""
    for file_range in file_ranges:
        remaining = file_range
        while remaining.start < remaining.stop:
            nbytes = remaining.stop - remaining.start
            size = min(nbytes, BLOCK_BYTES - remaining.start % BLOCK_BYTES, limit - position(remaining) % limit)
            if size == nbytes:
                yield remaining
                break
            yield remaining.slice_bytes(0, size)
            remaining = remaining.slice_bytes(size, nbytes - size)


def _group_adjacent(
    file_ranges: Iterable[FileRange], starts_chunk: Callable[[FileRange], bool], limit: int
) -> Iterator[IoChunk]:
    """Group ranges that are adjacent in a file. A range begins a new chunk if ``starts_chunk`` is true for it."""
    current: list[FileRange] = []
    file = offset = size = 0
    for file_range in file_ranges:
        nbytes = file_range.stop - file_range.start
        follows = file_range.file == file and file_range.offset == offset + size and size + nbytes <= limit
        if current and (not follows or starts_chunk(file_range)):
            yield IoChunk(file, offset, size, current)
            current = []
        if not current:
            file, offset, size = file_range.file, file_range.offset, 0
        current.append(file_range)
        size += nbytes
    if current:
        yield IoChunk(file, offset, size, current)
