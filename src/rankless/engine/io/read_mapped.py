"""Reading of bytes that other ranks of the host read, too: this rank copies just the parts that it needs.

:mod:`rankless.inference.joined_reads` calls it on each rank of a host, mostly in the background thread of the loader of
weights. Several threads write into sinks and report progress. The fragments must describe the bytes that went into
the sinks: ranks verify them in the vote "reading the weights".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rankless.engine.io.read import read_host_shared
from rankless.engine.io.read_order import rotate_by_rank
from rankless.engine.io.requests import Fragments, OnBytesMoved, SinkOf, merge_fragments
from rankless.engine.io.tensor_sources import Source
from rankless.engine.plan.file_ranges import FileRange, IoChunk, tensor_chunks
from rankless.ondisk.block_crcs import Fragment, crc64
from rankless.process.worker_threads import run_in_threads
from rankless.storage.aligned_memory import Bytes
from rankless.storage.mapped_ranges import MappedRanges


def read_mapped(
    files: Sequence[Source],
    file_ranges: Sequence[FileRange],
    rank: int,
    sink_of: SinkOf,
    on_moved: OnBytesMoved,
    *,
    hashed: bool,
) -> Fragments:
    """Write file ranges out of the page cache into sinks; return the fragments, if they are ``hashed``.

    Ranks share the reading: one reads a range from the disk, and the others find it in the page cache.
    """
    ordered = sorted(file_ranges, key=lambda file_range: (file_range.file, file_range.offset))
    chunks = list(rotate_by_rank(list(tensor_chunks(ordered)), rank))
    with MappedRanges() as mappings:

        def write_one(chunk: IoChunk) -> list[tuple[int, Fragment]] | IoChunk:
            path = files[chunk.file]
            data = mappings.map_range(path, chunk.offset, chunk.size) if isinstance(path, Path) else None
            if data is None:
                return chunk
            fragments = list(_write_ranges(chunk, data, sink_of, hashed=hashed))
            on_moved(chunk.size)
            return fragments

        results = run_in_threads(write_one, chunks)
    fragments = merge_fragments(result for result in results if isinstance(result, list))
    unmapped = [file_range for result in results if isinstance(result, IoChunk) for file_range in result.file_ranges]
    for tensor, more in read_host_shared(files, unmapped, rank, sink_of, on_moved, hashed=hashed).items():
        fragments.setdefault(tensor, []).extend(more)
    return fragments


def _write_ranges(chunk: IoChunk, data: Bytes, sink_of: SinkOf, *, hashed: bool) -> Iterator[tuple[int, Fragment]]:
    done = 0
    for tensor, start, stop, local, _, _ in chunk.file_ranges:  # adjacent in the file
        part = data[done : done + stop - start]
        sink_of(tensor).write(local, part)
        if hashed:
            yield tensor, Fragment(start, stop, crc64(part))
        done += stop - start
