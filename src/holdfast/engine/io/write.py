"""Writing what lies in one piece here: chunks of a file are filled, hashed, and written by a few threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from holdfast.engine.io.requests import (
    ByteProvider,
    Fragments,
    Moved,
    OriginOf,
    ignore_progress,
    merge_fragments,
    run_in_threads,
)
from holdfast.engine.plan.file_ranges import CHUNK, FileRange, IoChunk, file_chunks
from holdfast.ondisk.blocks import Fragment, crc64
from holdfast.storage.direct_io import SECTOR_BYTES, DirectWriter, FileWriter
from holdfast.storage.memory import BufferPool, Bytes

#: Bytes copied and hashed at a time.
_SLICE = 256 * 2**10


def write_pieces(
    files: Sequence[Path],
    pieces: Sequence[FileRange],
    part_of: OriginOf,
    moved: Moved = ignore_progress,
    opened: Callable[[Path], FileWriter] = DirectWriter,
) -> Fragments:
    """Write this rank's pieces into files that exist, make them durable, and return what it hashed.

    Beside the tensors it needs a few buffers, whatever their size. ``opened`` says how the files are written.
    """
    buffers = BufferPool(CHUNK + SECTOR_BYTES)
    with ExitStack() as stack:
        writers = {file: stack.enter_context(opened(files[file])) for file in sorted({piece.file for piece in pieces})}

        def work(chunk: IoChunk) -> list[tuple[int, Fragment]]:
            fragments = _write(chunk, part_of, buffers.get(), writers[chunk.file])
            moved(chunk.size)
            return fragments

        found = run_in_threads(work, file_chunks(pieces))
        for writer in writers.values():
            writer.sync()
    return merge_fragments(found)


def _write(chunk: IoChunk, part_of: OriginOf, buffer: Bytes, writer: FileWriter) -> list[tuple[int, Fragment]]:
    lead = filled = chunk.offset % SECTOR_BYTES
    found = []
    for piece in chunk.pieces:
        size = piece.stop - piece.start
        into = buffer[filled : filled + size]
        found.append((piece.tensor, Fragment(piece.start, piece.stop, _fill(into, part_of(piece.tensor), piece.local))))
        filled += size
    writer.write(chunk.offset, buffer[lead:filled].data)
    return found


def _fill(into: Bytes, part: ByteProvider, start: int) -> int:
    """Copy bytes of a tensor, and hash each slice while it is still in the processor's nearest cache."""
    crc = 0
    for at in range(0, len(into), _SLICE):
        filled = into[at : at + _SLICE]
        part.copy_out(start + at, filled)
        crc = crc64(filled, crc)
    return crc
