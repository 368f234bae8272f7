"""Reading: byte ranges straight into the tensors, hashed while they are still in the processor's cache."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from holdfast.engine.local import Bytes
from holdfast.engine.transfer import CHUNK, Buffers, Chunk, Fragments, PartOf, Piece, gather, in_threads, tensor_chunks
from holdfast.layout.blocks import Fragment, crc64
from holdfast.storage.bulk import SECTOR, BulkReader


def read_pieces(files: Sequence[Path], pieces: Sequence[Piece], part_of: PartOf) -> Fragments:
    """Read pieces of files into this rank's parts of tensors and return what it hashed.

    Beside the tensors it needs a few buffers, whatever their size.
    """
    ordered = sorted(pieces, key=lambda piece: (piece.file, piece.offset))
    buffers = Buffers(CHUNK + SECTOR)
    with ExitStack() as stack:
        readers = {
            file: stack.enter_context(BulkReader(files[file])) for file in sorted({piece.file for piece in ordered})
        }
        found = in_threads(lambda chunk: _read(chunk, part_of, buffers, readers[chunk.file]), tensor_chunks(ordered))
    return gather(found)


def _read(chunk: Chunk, part_of: PartOf, buffers: Buffers, reader: BulkReader) -> list[tuple[int, Fragment]]:
    in_place = _view(chunk.pieces[0], part_of) if len(chunk.pieces) == 1 else None
    data = buffers.get()[: chunk.size] if in_place is None else in_place
    reader.read(chunk.offset, memoryview(data))
    found = []
    done = 0
    for piece in chunk.pieces:
        size = piece.stop - piece.start
        part = data[done : done + size]
        if in_place is None:
            part_of(piece.tensor).write(piece.local, part)
        found.append((piece.tensor, Fragment(piece.start, piece.stop, crc64(part))))
        done += size
    return found


def _view(piece: Piece, part_of: PartOf) -> Bytes | None:
    return part_of(piece.tensor).view(piece.local, piece.local + piece.stop - piece.start)
