"""Ranges of bytes in files: which bytes of a tensor are where in a file, and the chunks that they are moved in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from holdfast.ondisk.blocks import BLOCK_BYTES

#: Bytes moved at a time by one thread, and the size of its buffer.
CHUNK = 4 * 2**20


class FileRange(NamedTuple):
    """Bytes ``[start, stop)`` of tensor number ``tensor``, to be written or read by this rank.

    ``local`` is where they start in this rank's part of the tensor, ``offset`` in file number ``file``.
    """

    tensor: int
    start: int
    stop: int
    local: int
    file: int
    offset: int

    def cut(self, skip: int, size: int) -> FileRange:
        """``size`` bytes of it, after the first ``skip``."""
        return FileRange(
            self.tensor, self.start + skip, self.start + skip + size, self.local + skip, self.file, self.offset + skip
        )


def count_bytes(pieces: Iterable[FileRange]) -> int:
    """The size of pieces together."""
    return sum(piece.stop - piece.start for piece in pieces)


class IoChunk(NamedTuple):
    """A contiguous range of one file of at most :data:`CHUNK` bytes, and the pieces that it consists of."""

    file: int
    offset: int
    size: int
    pieces: Sequence[FileRange]


def file_chunks(pieces: Iterable[FileRange]) -> Iterator[IoChunk]:
    """Chunks cut at multiples of :data:`CHUNK` in the file: for direct writes."""
    return _group(_cut(pieces, lambda piece: piece.offset), lambda piece: piece.offset % CHUNK == 0)


def tensor_chunks(pieces: Iterable[FileRange]) -> Iterator[IoChunk]:
    """Chunks cut at multiples of :data:`CHUNK` in the tensor, so never inside an element: for reads."""
    return _group(_cut(pieces, lambda piece: piece.start), lambda _: False)


def _cut(pieces: Iterable[FileRange], position: Callable[[FileRange], int]) -> Iterator[FileRange]:
    """Pieces that cross neither a multiple of ``CHUNK`` by ``position`` nor a block of their tensor."""
    for piece in pieces:
        rest = piece
        while rest.start < rest.stop:
            size = min(rest.stop - rest.start, BLOCK_BYTES - rest.start % BLOCK_BYTES, CHUNK - position(rest) % CHUNK)
            yield rest if size == rest.stop - rest.start else rest.cut(0, size)
            rest = rest.cut(size, rest.stop - rest.start - size)


def _group(pieces: Iterable[FileRange], fresh: Callable[[FileRange], bool]) -> Iterator[IoChunk]:
    """Neighbours in a file together; a ``fresh`` piece begins a chunk of its own."""
    current: list[FileRange] = []
    file = offset = size = 0
    for piece in pieces:
        nbytes = piece.stop - piece.start
        follows = piece.file == file and piece.offset == offset + size and size + nbytes <= CHUNK
        if current and (not follows or fresh(piece)):
            yield IoChunk(file, offset, size, current)
            current = []
        if not current:
            file, offset, size = piece.file, piece.offset, 0
        current.append(piece)
        size += nbytes
    if current:
        yield IoChunk(file, offset, size, current)
