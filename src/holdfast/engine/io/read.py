"""Reading: byte ranges straight into the tensors, hashed while they are still in the processor's cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.engine.io.read_order import rotate_by_rank
from holdfast.engine.io.requests import Fragments, Moved, SinkOf, ignore_progress, merge_fragments, run_in_threads
from holdfast.engine.io.source_reader import SourceReader
from holdfast.engine.io.sources import Source
from holdfast.engine.plan.file_ranges import CHUNK, FileRange, IoChunk, tensor_chunks
from holdfast.ondisk.blocks import Fragment, crc64
from holdfast.storage.direct_reader import DirectFile
from holdfast.storage.memory import BufferPool, Bytes


def read_pieces(
    files: Sequence[Source], pieces: Sequence[FileRange], sink_of: SinkOf, moved: Moved = ignore_progress
) -> Fragments:
    """Read pieces of files that no other rank reads into this rank's parts of tensors; return what it hashed.

    Beside the tensors it needs a few buffers, whatever their size.
    """
    with SourceReader(files, DirectFile()) as opened:
        return _read_all(opened, _chunks(pieces), sink_of, moved)


def read_common(
    files: Sequence[Source], pieces: Sequence[FileRange], rank: int, sink_of: SinkOf, moved: Moved = ignore_progress
) -> Fragments:
    """The same for pieces that other ranks of the host read, too: what one reads, all find in the page cache."""
    with SourceReader(files) as opened:
        return _read_all(opened, rotate_by_rank(_chunks(pieces), rank), sink_of, moved)


def _chunks(pieces: Sequence[FileRange]) -> list[IoChunk]:
    return list(tensor_chunks(sorted(pieces, key=lambda piece: (piece.file, piece.offset))))


def _read_all(opened: SourceReader, chunks: Iterable[IoChunk], sink_of: SinkOf, moved: Moved) -> Fragments:
    buffers = BufferPool(CHUNK)

    def work(chunk: IoChunk) -> list[tuple[int, Fragment]]:
        fragments = _read(chunk, sink_of, buffers, opened)
        moved(chunk.size)
        return fragments

    return merge_fragments(run_in_threads(work, chunks))


def _read(chunk: IoChunk, sink_of: SinkOf, buffers: BufferPool, opened: SourceReader) -> list[tuple[int, Fragment]]:
    in_place = _view(chunk.pieces[0], sink_of) if len(chunk.pieces) == 1 else None
    if in_place is not None:
        return [_read_in_place(chunk, in_place, opened)]
    return _read_apart(chunk, sink_of, buffers.get()[: chunk.size], opened)


def _read_in_place(chunk: IoChunk, into: Bytes, opened: SourceReader) -> tuple[int, Fragment]:
    crc = 0
    for filled in opened.read_in_parts(chunk.file, chunk.offset, into.data):
        crc = crc64(filled, crc)
    return _fragment(chunk.pieces[0], crc)


def _read_apart(chunk: IoChunk, sink_of: SinkOf, data: Bytes, opened: SourceReader) -> list[tuple[int, Fragment]]:
    """Read into a buffer, and hand each piece to its sink."""
    opened.read(chunk.file, chunk.offset, data.data)
    found = []
    for piece in chunk.pieces:
        at = piece.offset - chunk.offset
        part = data[at : at + piece.stop - piece.start]
        sink_of(piece.tensor).write(piece.local, part)
        found.append(_fragment(piece, crc64(part)))
    return found


def _fragment(piece: FileRange, crc: int) -> tuple[int, Fragment]:
    return piece.tensor, Fragment(piece.start, piece.stop, crc)


def _view(piece: FileRange, sink_of: SinkOf) -> Bytes | None:
    return sink_of(piece.tensor).view(piece.local, piece.local + piece.stop - piece.start)
