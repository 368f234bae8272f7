"""Reading of byte ranges straight into the tensors. They are hashed while they are still in the processor's cache.

A load calls it on each rank in the vote "reading" (:mod:`rankless.load.rank_reads`), after the last check: from here on
tensors of the caller change. The view of a checkpoint, conversions, ``rankless verify`` and the loader of weights for
engines read through it, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rankless.engine.io.read_buffers import HostReadBuffers, ReadBuffers
from rankless.engine.io.read_order import rotate_by_rank
from rankless.engine.io.requests import Fragments, OnBytesMoved, SinkOf, ignore_progress, make_fragment, merge_fragments
from rankless.engine.io.source_reader import SourceReader
from rankless.engine.io.tensor_sources import Source, paths_of
from rankless.engine.plan.file_ranges import CHUNK, FileRange, IoChunk, count_bytes, tensor_chunks
from rankless.ondisk.block_crcs import Fragment, crc64
from rankless.process.worker_threads import THREADS, count_threads, run_in_threads
from rankless.storage.aligned_memory import Bytes
from rankless.storage.direct_io import BufferedReader
from rankless.storage.exact_reader import ExactReaderFactory
from rankless.storage.reader_pool import MakeReaders, ReaderPool
from rankless.storage.store import store_of

if TYPE_CHECKING:
    from rankless.engine.io.device_streams import CopyStream  # imports torch


def read_file_ranges(
    files: Sequence[Source],
    file_ranges: Sequence[FileRange],
    sink_of: SinkOf,
    on_moved: OnBytesMoved = ignore_progress,
    *,
    make_readers: MakeReaders = ReaderPool,
    streams: Sequence[CopyStream] = (),
    hashed: bool = True,
) -> Fragments:
    """Read file ranges that no other rank reads into this rank's shards; return the fragments that it hashed.

    Apart from the tensors it needs a few buffers of fixed size. ``streams`` belong to the accelerators with shards. If
    not ``hashed``, there are no fragments: CRCs that are compared with nothing are half of the processor's time.

    A load calls it on each rank in the vote "reading"; other readers call it in one process.
    """
    grain = _choose_grain(files)
    with (
        SourceReader(files, make_readers(ExactReaderFactory())) as reader,
        _open_buffers(sink_of, grain, streams if file_ranges else ()) as buffers,
    ):
        chunks = _sorted_chunks(file_ranges, grain)
        return _read_all(reader, chunks, grain.threads, buffers, on_moved, hashed=hashed)


def read_host_shared(
    files: Sequence[Source],
    file_ranges: Sequence[FileRange],
    rank: int,
    sink_of: SinkOf,
    on_moved: OnBytesMoved = ignore_progress,
    *,
    make_readers: MakeReaders = ReaderPool,
    streams: Sequence[CopyStream] = (),
    hashed: bool = True,
) -> Fragments:
    """Read file ranges that other ranks of the host read, too. See :func:`read_file_ranges`.

    Ranks share the reading: one reads a range from the disk, and the others find it in the page cache.

    A load calls it on each rank of a host in the vote "reading".
    """
    with (
        SourceReader(files, make_readers(BufferedReader)) as reader,
        _open_buffers(sink_of, _FILE_GRAIN, streams if file_ranges else ()) as buffers,
    ):
        chunks = rotate_by_rank(_sorted_chunks(file_ranges, _FILE_GRAIN), rank)
        threads = count_threads(count_bytes(file_ranges), _FILE_GRAIN.threads)
        return _read_all(reader, chunks, threads, buffers, on_moved, hashed=hashed)


class _ReadGrain(NamedTuple):
    """The bytes of a read, and the number of reads at a time."""

    nbytes: int
    threads: int


_FILE_GRAIN = _ReadGrain(CHUNK, THREADS)

#: Each request to an object store costs a tenth of a second before its first byte, and one connection is slow.
_OBJECT_GRAIN = _ReadGrain(16 * 2**20, 8)


def _choose_grain(files: Sequence[Source]) -> _ReadGrain:
    return _OBJECT_GRAIN if any(store_of(path).is_remote for path in paths_of(files)) else _FILE_GRAIN


def _open_buffers(sink_of: SinkOf, grain: _ReadGrain, streams: Sequence[CopyStream]) -> ReadBuffers:
    """Return the memory to read into. Without accelerators this imports no torch."""
    if not streams:
        return HostReadBuffers(sink_of, grain.nbytes)
    from rankless.engine.io.device_read_buffers import DeviceReadBuffers  # noqa: PLC0415 - imports torch

    return DeviceReadBuffers(sink_of, grain.nbytes, grain.threads, streams)


def _sorted_chunks(file_ranges: Sequence[FileRange], grain: _ReadGrain) -> list[IoChunk]:
    ordered = sorted(file_ranges, key=lambda file_range: (file_range.file, file_range.offset))
    return list(tensor_chunks(ordered, grain.nbytes))


def _read_all(
    reader: SourceReader,
    chunks: Iterable[IoChunk],
    threads: int,
    buffers: ReadBuffers,
    on_moved: OnBytesMoved,
    *,
    hashed: bool,
) -> Fragments:
    def read_one(chunk: IoChunk) -> list[tuple[int, Fragment]]:
        fragments = _read_chunk(chunk, buffers, reader, hashed=hashed)
        on_moved(chunk.size)
        return fragments

    return merge_fragments(run_in_threads(read_one, chunks, threads))


def _read_chunk(
    chunk: IoChunk, buffers: ReadBuffers, reader: SourceReader, *, hashed: bool
) -> list[tuple[int, Fragment]]:
    in_place = buffers.view(chunk.file_ranges[0]) if len(chunk.file_ranges) == 1 else None
    if in_place is not None and hashed:
        return [_read_in_place(chunk, in_place, reader)]
    if in_place is not None:
        reader.read(chunk.file, chunk.offset, in_place.data)
        return []
    with buffers.take_buffer() as buffer:
        return list(_read_buffered(chunk, buffers, buffer[: chunk.size], reader, hashed=hashed))


def _read_in_place(chunk: IoChunk, buffer: Bytes, reader: SourceReader) -> tuple[int, Fragment]:
    crc = 0
    for filled in reader.read_in_chunks(chunk.file, chunk.offset, buffer.data):
        crc = crc64(filled, crc)
    return make_fragment(chunk.file_ranges[0], crc)


def _read_buffered(
    chunk: IoChunk, buffers: ReadBuffers, data: Bytes, reader: SourceReader, *, hashed: bool
) -> Iterator[tuple[int, Fragment]]:
    """Read into a buffer, write each file range to its sink, and yield the fragment of each, if it is ``hashed``."""
    reader.read(chunk.file, chunk.offset, data.data)
    done = 0
    for file_range in chunk.file_ranges:  # adjacent in the file
        tensor, start, stop, local, _, _ = file_range
        range_bytes = data[done : done + stop - start]
        buffers.write(tensor, local, range_bytes)
        if hashed:
            yield tensor, Fragment(start, stop, crc64(range_bytes))
        done += stop - start
