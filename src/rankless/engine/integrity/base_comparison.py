"""Comparison of this rank's tensors with an earlier checkpoint, the base, to find bytes that need not be written.

First a few pages of each file are compared. If training has changed a file, they almost always show it, and nothing
more is read or hashed. They are no proof: every byte that is left out of a checkpoint was hashed for it.

:mod:`rankless.save.incremental` uses it on each rank: :meth:`~BaseComparison.sample_files` in the vote on the
preparation, :meth:`~BaseComparison.sum_files` in the vote "finding unchanged bytes",
:meth:`~BaseComparison.sum_tensors` in the vote "checking frozen tensors", in the background thread if there is one. A
sample may only decide which bytes are hashed, never which are shared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from rankless.engine.integrity.block_sums import BlockSums, concatenate_sums, sum_fragments, trust_ranges
from rankless.engine.io.column_tables import concatenate_tables
from rankless.engine.io.device_streams import begin_copies
from rankless.engine.io.fragments import FragmentTable
from rankless.engine.io.requests import ShardOf
from rankless.engine.io.tensor_bytes import TensorBytes
from rankless.engine.plan.file_ranges import CHUNK, FileRange, IoChunk, tensor_chunks
from rankless.engine.plan.range_columns import TensorRanges
from rankless.engine.plan.save_plan import SavePlan, StripedShard
from rankless.errors import CorruptCheckpointError, StorageError
from rankless.observe.spans import traced
from rankless.ondisk.block_crcs import crc64
from rankless.process.worker_threads import count_threads, run_in_threads
from rankless.storage import posix
from rankless.storage.aligned_memory import BufferPool
from rankless.storage.direct_io import BufferedReader
from rankless.storage.exact_reader import ExactReaderFactory

#: The bytes of a sample, and the number of samples of the frozen tensors, and of the others, of each file. Other places
#: are compared in each save.
_SAMPLE_BYTES, _SAMPLES = 4096, 4

#: The chunks of files, of 4 MiB, that are read back and compared in full in each save, past the page cache if possible.
_READ_BACK_CHUNKS = 4

#: Shards with shorter ranges, in bytes, are not hashed: the calls would take longer than a write.
_MIN_RANGE_BYTES = 512

#: The most ranges of a striped shard that samples are taken from.
_SAMPLED_RANGES = 64

#: An odd number near 2**64 times the golden ratio: its multiples spread evenly over any range.
_STEP = 0x9E3779B97F4A7C15

Item = TypeVar("Item")

#: A fragment with its tensor: the number of the tensor, start, stop and CRC.
_TensorFragment = tuple[int, int, int, int]


class FileSamples(NamedTuple):
    """The result of a rank's samples of a file: if all of them, and if any of them, match the base."""

    all_match: bool
    any_match: bool


class BaseComparison:
    """A comparison of one rank's share of a plan with the files of the base in ``folder``.

    Without a folder no file is read. ``number`` counts saves, so that each takes other samples.
    """

    def __init__(self, plan: SavePlan, shard_of: ShardOf, folder: Path | None, number: int) -> None:
        self._plan, self._shard_of, self._folder, self._number = plan, shard_of, folder, number

    @traced("sample the files before", "hash")
    def sample_files(self, frozen: Collection[int], *, clones: bool) -> list[FileSamples]:
        """Compare samples of each file: of the ``frozen`` tensors, and of the others, which show a change sooner.

        Others on accelerators count as changed: a read of them would wait for all that the caller has enqueued. So of a
        file with such tensors only those that are frozen are compared. Without ``clones``, parts of files cannot be
        shared: so the first sample that differs ends the comparison of its file.
        """
        ranges = self._ranges_by_file()
        tensors = {file_range.tensor for of_file in ranges.values() for file_range in of_file}
        devices = {stream.device for stream in begin_copies(map(self._shard_of, tensors))}
        changed = {
            tensor for tensor in tensors.difference(frozen) if devices and self._shard_of(tensor).device in devices
        }
        return [
            self._sample_file(number, ranges.get(number, ()), frozen, changed, clones=clones)
            for number in range(len(self._plan.files))
        ]

    @traced("hash the files before", "hash")
    def sum_files(self, whole: Collection[int], partial: Collection[int], trusted: Collection[int]) -> BlockSums:
        """Hash this rank's bytes of some files.

        All bytes of the ``whole`` files are hashed. In ``partial`` files, only the bytes of tensors with a matching
        sample are hashed. Bytes of ``trusted`` tensors are not hashed now.
        """
        chosen = {file_range.tensor for file_range in self._plan.file_ranges if file_range.file in whole}
        chosen |= {span.tensor for shard in self._plan.striped_shards for span in shard.spans if span.file in whole}
        chosen |= self._sample_tensors(partial)
        hashed = self.sum_tensors(chosen.difference(trusted))
        return concatenate_sums(
            hashed, trust_ranges(self._trusted_ranges(chosen & {*trusted}), self._plan.tensor_sizes)
        )

    @traced("hash frozen tensors", "hash")
    def sum_tensors(self, tensors: Collection[int]) -> BlockSums:
        """Hash this rank's bytes of some tensors, and read some of them back from the base's folder."""
        chunks = list(tensor_chunks(fr for fr in self._plan.file_ranges if fr.tensor in tensors))
        reader = None if self._folder is None else _ChunkReader(self._folder, self._plan)
        checked = set() if reader is None else set(_spread(range(len(chunks)), _READ_BACK_CHUNKS, self._number))

        def hash_chunk(number: int) -> list[_TensorFragment]:
            fragments = list(_hash_chunk(chunks[number], self._shard_of))
            if reader is not None and number in checked and not reader.holds(chunks[number], fragments):
                return []  # the file is corrupt, or the tensor has changed: it is written in either case
            return fragments

        fragments = run_in_threads(hash_chunk, range(len(chunks)), count_threads(sum(chunk.size for chunk in chunks)))
        striped = run_in_threads(lambda shard: _hash_striped(shard, self._shard_of), self._hashable_striped(tensors))
        return sum_fragments(concatenate_tables([_tabulate(fragments), *striped]), self._plan.tensor_sizes)

    def _trusted_ranges(self, tensors: Collection[int]) -> TensorRanges:
        chunks = tensor_chunks(file_range for file_range in self._plan.file_ranges if file_range.tensor in tensors)
        contiguous = TensorRanges.of_file_ranges(file_range for chunk in chunks for file_range in chunk.file_ranges)
        striped = map(TensorRanges.of_striped_shard, self._hashable_striped(tensors))
        return concatenate_tables([contiguous, *striped])

    def _hashable_striped(self, tensors: Collection[int]) -> list[StripedShard]:
        """Return the striped shards of some tensors, without shards with very short ranges."""
        return [
            striped
            for striped in self._plan.striped_shards
            if striped.spans[0].tensor in tensors and striped.shard.mean_range_bytes >= _MIN_RANGE_BYTES
        ]

    def _ranges_by_file(self) -> Mapping[int, Sequence[FileRange]]:
        """Return the ranges of each file that this rank has in memory; of striped shards only some."""
        by_file: dict[int, list[FileRange]] = {}
        for file_range in self._plan.file_ranges:
            by_file.setdefault(file_range.file, []).append(file_range)
        for shard in self._plan.striped_shards:
            for file_range in islice(shard.iter_ranges(), _SAMPLED_RANGES):
                by_file.setdefault(file_range.file, []).append(file_range)
        return by_file

    def _sample_tensors(self, files: Collection[int]) -> set[int]:
        """Return the tensors of some files that have a matching sample."""
        matching: set[int] = set()
        for number, ranges in self._ranges_by_file().items():
            if number not in files:
                continue
            by_tensor: dict[int, list[FileRange]] = {}
            for file_range in ranges:
                by_tensor.setdefault(file_range.tensor, []).append(file_range)
            sampled = [next(iter(_spread(of_tensor, 1, self._number))) for of_tensor in by_tensor.values()]
            matches = self._compare(number, sampled)
            matching |= {file_range.tensor for file_range, is_equal in zip(sampled, matches, strict=True) if is_equal}
        return matching

    def _sample_file(
        self,
        number: int,
        ranges: Sequence[FileRange],
        frozen: Collection[int],
        changed: Collection[int],
        *,
        clones: bool,
    ) -> FileSamples:
        has_changed = any(part.tensor in changed for part in ranges)
        if has_changed and not clones:
            return FileSamples(all_match=False, any_match=False)
        parts = [[part for part in ranges if (part.tensor in frozen) == is_frozen] for is_frozen in (False, True)]
        compared = parts[1:] if has_changed else parts
        sampled = [part for of in compared for part in _spread(of, _SAMPLES, self._number)]
        first = 0 if clones else 1
        matches = self._compare(number, sampled[:first])
        if not all(matches):
            return FileSamples(all_match=False, any_match=False)
        matches += self._compare(number, sampled[first:])
        return FileSamples(all(matches) and not has_changed, any(matches))

    def _compare(self, number: int, ranges: Sequence[FileRange]) -> list[bool]:
        """Compare a sample of each range with the file; ``False`` for all if the file cannot be read."""
        if not ranges or self._folder is None:
            return []
        path = self._folder / self._plan.files[number].path
        try:
            posix.check_regular(path, within=(self._folder,))  # a pipe would block
            with closing(BufferedReader(path)) as reader:
                threads = count_threads(len(ranges) * _SAMPLE_BYTES)
                return run_in_threads(lambda file_range: self._matches(file_range, reader), ranges, threads)
        except (StorageError, CorruptCheckpointError):
            return [False] * len(ranges)

    def _matches(self, file_range: FileRange, reader: BufferedReader) -> bool:
        size = file_range.stop - file_range.start
        count = -(-size // _SAMPLE_BYTES)
        skip = (self._number * _STEP % 2**64 * count >> 64) * _SAMPLE_BYTES
        sample = file_range.slice_bytes(skip, min(_SAMPLE_BYTES, size - skip))
        stored = bytearray(sample.stop - sample.start)
        reader.read(sample.offset, memoryview(stored))
        in_memory = np.empty(len(stored), np.uint8)
        self._shard_of(sample.tensor).copy_out(sample.local, in_memory)
        return in_memory.tobytes() == stored


class _ChunkReader:
    """A reader of chunks of the base's files, past the page cache if possible."""

    def __init__(self, folder: Path, plan: SavePlan) -> None:
        self._paths = [folder / file.path for file in plan.files]
        self._open_reader, self._buffers = ExactReaderFactory(), BufferPool(CHUNK)

    def holds(self, chunk: IoChunk, fragments: Iterable[_TensorFragment]) -> bool:
        """Return whether the base has a chunk's bytes: its CRCs there must equal the CRCs in ``fragments``."""
        stored = self._buffers.get()[: chunk.size]
        try:
            with closing(self._open_reader(self._paths[chunk.file])) as reader:
                reader.read(chunk.offset, stored.data)
        except (StorageError, CorruptCheckpointError):
            return False
        crcs = [
            crc64(stored[file_range.offset - chunk.offset :][: file_range.stop - file_range.start])
            for file_range in chunk.file_ranges
        ]
        return crcs == [crc for *_, crc in fragments]


def _spread(items: Sequence[Item], count: int, number: int) -> Sequence[Item]:
    """Return up to ``count`` of the items at even distances, other ones for each number."""
    if len(items) <= count:
        return items
    first = number * _STEP % 2**64 * len(items) >> 64
    return [items[(first + place * len(items) // count) % len(items)] for place in range(count)]


def _hash_chunk(chunk: IoChunk, shard_of: ShardOf) -> Iterator[_TensorFragment]:
    for file_range in chunk.file_ranges:
        size = file_range.stop - file_range.start
        crc = shard_of(file_range.tensor).compute_crc(file_range.local, file_range.local + size)
        yield file_range.tensor, file_range.start, file_range.stop, crc


def _hash_striped(striped: StripedShard, shard_of: ShardOf) -> FragmentTable:
    """Hash the ranges of a striped shard one by one."""
    ranges = TensorRanges.of_striped_shard(striped)
    window = _ShardWindow(shard_of(striped.spans[0].tensor))
    ends = [0, *np.cumsum(ranges.stop - ranges.start).tolist()]
    crcs = [crc64(window.slice_bytes(start, stop)) for start, stop in pairwise(ends)]
    return FragmentTable(*ranges, np.array(crcs, np.uint64))


class _ShardWindow:
    """The bytes of a shard, read in order: in place, or of a copy of a part of them at a time."""

    def __init__(self, shard: TensorBytes) -> None:
        self._shard, self._start = shard, 0
        in_place = shard.view(0, shard.nbytes)
        self._bytes = memoryview(b"") if in_place is None else in_place.data

    def slice_bytes(self, start: int, stop: int) -> memoryview:
        """Return bytes ``[start, stop)``, at most a chunk."""
        if stop > self._start + len(self._bytes):
            copy = np.empty(min(CHUNK, self._shard.nbytes - start), np.uint8)
            self._shard.copy_out(start, copy)
            self._start, self._bytes = start, copy.data
        return self._bytes[start - self._start : stop - self._start]


def _tabulate(fragments: Iterable[Sequence[_TensorFragment]]) -> FragmentTable:
    columns = list(zip(*(fragment for of_item in fragments for fragment in of_item), strict=True)) or [(), (), (), ()]
    return FragmentTable(np.array(columns[0], np.uint32), *(np.array(column, np.uint64) for column in columns[1:]))
