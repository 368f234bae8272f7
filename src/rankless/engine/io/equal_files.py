"""Compares the bytes that a rank is to write with the files that are there already, byte for byte.

A save of a component that replaces an earlier model, and a drain into a run with an earlier checkpoint, ask it on every
rank, in a vote of their own. An equal file is not written again: to read is faster, and a disk wears by writes. Neither
a record of the last save nor CRCs are trusted, because somebody may have changed the files. So they are read past the
page cache: the bytes on the disk count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rankless.engine.io.requests import ByteProvider, Fragments, ProviderOf, make_fragment, merge_fragments
from rankless.engine.plan.file_ranges import CHUNK, FileRange, split_at_blocks
from rankless.errors import StorageError
from rankless.ondisk.block_crcs import Fragment, crc64
from rankless.process.worker_threads import run_in_threads
from rankless.storage.aligned_memory import Bytes
from rankless.storage.direct_io import BufferedReader
from rankless.storage.posix import identify, list_writable_mappings
from rankless.storage.second_read import UncachedReader

#: The bytes of a range that are compared first, and the most ranges of a file. Training changes all of a tensor.
_SAMPLE_BYTES, _SAMPLES = 4096, 64


def find_equal_files(
    files: Mapping[int, Path], file_ranges: Sequence[FileRange], bytes_of: ProviderOf
) -> tuple[list[int], Fragments]:
    """Return the numbers of the files that have the bytes of this rank, and the fragments of these bytes.

    ``files`` are the candidates. A file without bytes of this rank is equal. One that cannot be read is not; nor is one
    that this process has mapped to write: the next step of a training may change it.
    """
    mapped = list_writable_mappings()
    files = {number: path for number, path in files.items() if (found := identify(path)) and found[1] not in mapped}
    by_file: dict[int, list[FileRange]] = {number: [] for number in files}
    for file_range in file_ranges:
        if file_range.file in by_file and file_range.start < file_range.stop:
            by_file[file_range.file].append(file_range)
    equal, hashed = list[int](), list[list[tuple[int, Fragment]]]()
    for number, ranges in by_file.items():
        fragments = _compare_file(files[number], ranges, bytes_of)
        if fragments is not None:
            equal.append(number)
            hashed.append(fragments)
    return equal, merge_fragments(hashed)


def _compare_file(
    path: Path, file_ranges: Sequence[FileRange], bytes_of: ProviderOf
) -> list[tuple[int, Fragment]] | None:
    """Return the fragments of some ranges if the file has their bytes; else ``None``."""
    if not file_ranges:
        return []
    step = -(-len(file_ranges) // _SAMPLES)
    samples = [_first_bytes(file_range) for file_range in file_ranges[::step]]
    pieces = [piece for file_range in file_ranges for block in split_at_blocks(file_range) for piece in _cut(block)]
    try:
        with UncachedReader(path) as reader:

            def compare(piece: FileRange) -> tuple[int, Fragment] | None:
                return _compare_range(reader, piece, bytes_of(piece.tensor))

            if None in map(compare, samples):
                return None
            found = run_in_threads(compare, pieces)
    except StorageError:  # it is removed or replaced meanwhile
        return None
    fragments = [fragment for fragment in found if fragment is not None]
    return fragments if len(fragments) == len(pieces) else None


def _first_bytes(file_range: FileRange) -> FileRange:
    return file_range.slice_bytes(0, min(_SAMPLE_BYTES, file_range.stop - file_range.start))


def _cut(file_range: FileRange) -> list[FileRange]:
    """Return a range in pieces of one buffer each."""
    size = file_range.stop - file_range.start
    return [file_range.slice_bytes(at, min(CHUNK, size - at)) for at in range(0, size, CHUNK)]


def _compare_range(reader: BufferedReader, piece: FileRange, source: ByteProvider) -> tuple[int, Fragment] | None:
    size = piece.stop - piece.start
    stored = np.empty(size, np.uint8)
    reader.read(piece.offset, stored.data)
    own: Bytes | None = source.view(piece.local, piece.local + size)
    if own is None:
        own = np.empty(size, np.uint8)
        source.copy_out(piece.local, own)
    return make_fragment(piece, crc64(own)) if np.array_equal(own, stored) else None
