"""Writing: chunks of a file are filled from the tensors, hashed, and written by a few threads."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from holdfast.engine.local import Bytes
from holdfast.engine.transfer import CHUNK, Buffers, Chunk, Fragments, PartOf, Piece, file_chunks, gather, in_threads
from holdfast.layout.blocks import Fragment, crc64
from holdfast.storage.bulk import SECTOR, BulkWriter


def write_pieces(files: Sequence[Path], pieces: Sequence[Piece], part_of: PartOf) -> Fragments:
    """Write this rank's pieces into files that exist, make them durable, and return what it hashed.

    Beside the tensors it needs a few buffers, whatever their size.
    """
    buffers = Buffers(CHUNK + SECTOR)
    with ExitStack() as stack:
        writers = {
            file: stack.enter_context(BulkWriter(files[file])) for file in sorted({piece.file for piece in pieces})
        }
        found = in_threads(
            lambda chunk: _write(chunk, part_of, buffers.get(), writers[chunk.file]), file_chunks(pieces)
        )
        for writer in writers.values():
            writer.sync()
    return gather(found)


def _write(chunk: Chunk, part_of: PartOf, buffer: Bytes, writer: BulkWriter) -> list[tuple[int, Fragment]]:
    lead = filled = chunk.offset % SECTOR
    found = []
    for piece in chunk.pieces:
        size = piece.stop - piece.start
        into = buffer[filled : filled + size]
        part_of(piece.tensor).copy_out(piece.local, into)
        found.append((piece.tensor, Fragment(piece.start, piece.stop, crc64(into))))
        filled += size
    writer.write(chunk.offset, buffer[lead:filled].data)
    return found
