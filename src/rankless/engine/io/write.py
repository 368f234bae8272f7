"""Writing of file ranges from this rank's own memory: a few threads fill, hash and write chunks of files.

:mod:`rankless.save.shard_writer` calls :func:`write_file_ranges` on every rank, in the vote "writing"; a drain and a
conversion call it, too. Rank 0 has created the files before, in the vote on the preparation. A rank must sync its bytes
before it reports their fragments, unless it saves alone and little.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from operator import methodcaller
from pathlib import Path

from rankless.engine.io.requests import (
    ByteProvider,
    Fragments,
    OnBytesMoved,
    ProviderOf,
    ignore_progress,
    make_fragment,
    merge_fragments,
)
from rankless.engine.plan.file_ranges import (
    CHUNK,
    FileRange,
    IoChunk,
    alternate_files,
    count_bytes,
    file_chunks,
)
from rankless.observe.spans import span, traced
from rankless.ondisk.block_crcs import Fragment, crc64
from rankless.process.worker_threads import THREADS, are_few, count_threads, run_in_threads
from rankless.storage.aligned_memory import BufferPool, Bytes
from rankless.storage.direct_io import SECTOR_BYTES, BufferedWriter, DirectWriter, FileWriter
from rankless.storage.filesystem_kind import is_in_memory
from rankless.storage.open_file_limit import max_open_files


@traced("write", "write")
def write_file_ranges(
    files: Sequence[Path],
    file_ranges: Sequence[FileRange],
    provider_of: ProviderOf,
    on_moved: OnBytesMoved = ignore_progress,
    open_writer: Callable[[Path], FileWriter] | None = None,
    *,
    sync: bool = True,
) -> Fragments:
    """Write this rank's file ranges into existing files, make them durable, and return the fragments that it hashed.

    Apart from the tensors it needs a few buffers of fixed size. ``open_writer`` opens a file for writing; by default
    many bytes go past the page cache. Without ``sync`` nothing is durable before the caller has synced the files.

    Each rank calls it for its own ranges, inside the vote on the writing.
    """
    # A direct write of a few bytes waits for the disk, and its sync waits again: a save of 33 kB took a fourth longer.
    open_writer = open_writer or (BufferedWriter if are_few(count_bytes(file_ranges)) else DirectWriter)
    buffers = BufferPool(
        min(CHUNK, count_bytes(file_ranges)) + SECTOR_BYTES, _pin_for_devices(file_ranges, provider_of)
    )
    results: list[list[tuple[int, Fragment]]] = []
    for some_ranges in _split_by_files(file_ranges):
        with ExitStack() as stack:
            writers = {
                file: stack.enter_context(open_writer(files[file]))
                for file in sorted({file_range.file for file_range in some_ranges})
            }

            def write_one(chunk: IoChunk, writers: Mapping[int, FileWriter] = writers) -> list[tuple[int, Fragment]]:
                fragments = _write_chunk(chunk, provider_of, buffers, writers[chunk.file])
                on_moved(chunk.size)
                return fragments

            results += run_in_threads(write_one, *_schedule_chunks(some_ranges, writers.values()))
            with span("sync", "sync"):
                finish = methodcaller("sync" if sync else "flush")
                run_in_threads(finish, writers.values(), THREADS if _waits_for_disk(writers, files, sync) else 1)
    return merge_fragments(results)


def _waits_for_disk(writers: Mapping[int, FileWriter], files: Sequence[Path], sync: bool) -> bool:
    """Return whether threads that finish these files wait for a disk, and so are best several."""
    if not all(writer.copies_bytes for writer in writers.values()):
        return True
    return sync and bool(writers) and not is_in_memory(files[next(iter(writers))].parent)


def _schedule_chunks(
    file_ranges: Sequence[FileRange], writers: Collection[FileWriter]
) -> tuple[Iterator[IoChunk], int]:
    """Return the chunks in the order that threads begin them in, and the number of threads."""
    chunks, nbytes = file_chunks(file_ranges), count_bytes(file_ranges)
    if not any(writer.copies_bytes for writer in writers):
        return chunks, count_threads(nbytes)
    # A write that copies keeps all others out of its file. So each thread has another file; of one file, a second
    # thread hashes meanwhile.
    return alternate_files(chunks), count_threads(nbytes, min(THREADS, max(2, len(writers))))


def _pin_for_devices(file_ranges: Sequence[FileRange], provider_of: ProviderOf) -> Callable[[Bytes], object] | None:
    """Return a function that pins a buffer for the tensors' devices, or ``None`` if all bytes are on the host."""
    providers = map(provider_of, {file_range.tensor for file_range in file_ranges})
    on_devices = [provider for provider in providers if _is_on_device(provider)]
    if not on_devices:
        return None
    from rankless.engine.io.device_streams import find_copy_streams  # noqa: PLC0415 - a conversion has no torch
    from rankless.engine.io.pinned_memory import pin_for  # noqa: PLC0415

    return partial(pin_for, find_copy_streams(on_devices))  # type: ignore[arg-type]


def _is_on_device(provider: ByteProvider) -> bool:
    return getattr(getattr(provider, "device", None), "type", "cpu") != "cpu"


def _split_by_files(file_ranges: Sequence[FileRange]) -> Iterator[Sequence[FileRange]]:
    """Yield the file ranges of no more files than may be open at a time."""
    max_open = max_open_files()
    files = sorted({file_range.file for file_range in file_ranges})
    if len(files) <= max_open:
        yield file_ranges
        return
    batch_of = {file: number // max_open for number, file in enumerate(files)}
    batches: dict[int, list[FileRange]] = {}
    for file_range in file_ranges:
        batches.setdefault(batch_of[file_range.file], []).append(file_range)
    yield from (batches[number] for number in sorted(batches))


def _write_chunk(
    chunk: IoChunk, provider_of: ProviderOf, buffers: BufferPool, writer: FileWriter
) -> list[tuple[int, Fragment]]:
    if writer.copies_bytes and len(chunk.file_ranges) == 1:
        fragment = _write_in_place(chunk.file_ranges[0], provider_of, writer)
        if fragment is not None:
            return [fragment]
    buffer, lead = buffers.get(), chunk.offset % SECTOR_BYTES
    filled, fragments = lead, []
    for file_range in chunk.file_ranges:
        size = file_range.stop - file_range.start
        buffer_slice = buffer[filled : filled + size]
        crc = copy_and_hash(buffer_slice, provider_of(file_range.tensor), file_range.local)
        fragments.append(make_fragment(file_range, crc))
        filled += size
    writer.write(chunk.offset, buffer[lead:filled].data)
    return fragments


def _write_in_place(file_range: FileRange, provider_of: ProviderOf, writer: FileWriter) -> tuple[int, Fragment] | None:
    """Hash and write bytes that are in memory, without a copy of them. Return ``None`` if that was not possible.

    Nothing else may change the tensor meanwhile. If something does, the written bytes may not match their CRC, and such
    a checkpoint would be of no use. So each slice is hashed again after it was written.
    """
    provider, size = provider_of(file_range.tensor), file_range.stop - file_range.start
    data = provider.view(file_range.local, file_range.local + size)
    if data is None:
        return None
    crc = 0
    for start in range(0, size, provider.slice_bytes):
        data_slice = data[start : start + provider.slice_bytes]
        before, crc = crc, crc64(data_slice, crc)
        writer.write(file_range.offset + start, data_slice.data)
        if crc64(data_slice, before) != crc:
            return None
    return make_fragment(file_range, crc)


def copy_and_hash(buffer_slice: Bytes, provider: ByteProvider, start: int) -> int:
    """Copy bytes of a tensor, and hash each slice right after it was copied."""
    crc, size = 0, provider.slice_bytes
    for done in range(0, len(buffer_slice), size):
        filled = buffer_slice[done : done + size]
        provider.copy_out(start + done, filled)
        crc = crc64(filled, crc)
    return crc
