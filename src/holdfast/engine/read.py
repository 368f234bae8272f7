"""Reading: byte ranges straight into the tensors, hashed while they are still in the processor's cache."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from holdfast.engine.local import Bytes
from holdfast.engine.transfer import CHUNK, Buffers, Chunk, Fragments, Piece, SinkOf, gather, in_threads, tensor_chunks
from holdfast.layout.blocks import Fragment, crc64
from holdfast.storage.bulk import SECTOR, BulkReader


def read_pieces(
    files: Sequence[Path], pieces: Sequence[Piece], sink_of: SinkOf, shared: AbstractSet[int] = frozenset()
) -> Fragments:
    """Read pieces of files into this rank's parts of tensors and return what it hashed.

    ``shared`` are the tensors that other ranks of this host may read as well: those come through the page cache.
    What is cached already does too, the rest past it. Beside the tensors this needs a few buffers, whatever their size.
    """
    ordered = sorted(pieces, key=lambda piece: (piece.file, piece.offset))
    buffers = Buffers(CHUNK + 2 * SECTOR)
    with ExitStack() as stack:
        wanted = sorted({piece.file for piece in ordered})
        readers = {file: stack.enter_context(BulkReader(files[file])) for file in wanted}
        task = _Task(sink_of, buffers, shared)
        return gather(in_threads(lambda chunk: task.read(chunk, readers[chunk.file]), tensor_chunks(ordered)))


@dataclass(frozen=True, slots=True)
class _Task:
    sink_of: SinkOf
    buffers: Buffers
    shared: AbstractSet[int]

    def read(self, chunk: Chunk, reader: BulkReader) -> list[tuple[int, Fragment]]:
        """Read one chunk, put it where it belongs, and hash it."""
        if not self._is_shared(chunk) and not reader.is_cached(chunk.offset, chunk.size):
            data = reader.read_direct(chunk.offset, chunk.size, self.buffers.get().data)
            return self._distribute(chunk, np.frombuffer(data, np.uint8))
        in_place = self._view(chunk.pieces[0]) if len(chunk.pieces) == 1 else None
        if in_place is None:
            buffered = self.buffers.get()[: chunk.size]
            reader.read(chunk.offset, buffered.data)
            return self._distribute(chunk, buffered)
        reader.read(chunk.offset, in_place.data)
        (piece,) = chunk.pieces
        return [(piece.tensor, Fragment(piece.start, piece.stop, crc64(in_place)))]

    def _distribute(self, chunk: Chunk, data: Bytes) -> list[tuple[int, Fragment]]:
        found = []
        for piece in chunk.pieces:
            at = piece.offset - chunk.offset
            part = data[at : at + piece.stop - piece.start]
            self.sink_of(piece.tensor).write(piece.local, part)
            found.append((piece.tensor, Fragment(piece.start, piece.stop, crc64(part))))
        return found

    def _is_shared(self, chunk: Chunk) -> bool:
        return any(piece.tensor in self.shared for piece in chunk.pieces)

    def _view(self, piece: Piece) -> Bytes | None:
        return self.sink_of(piece.tensor).view(piece.local, piece.local + piece.stop - piece.start)
