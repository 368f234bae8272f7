"""Comparison of file ranges with their checksums: they are split into chunks, which several threads read."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from awscrt.checksums import combine_crc32

from holdfast.engine.plan.file_ranges import CHUNK
from holdfast.errors import CorruptCheckpointError
from holdfast.ondisk.block_crcs import combine, crc64
from holdfast.ondisk.range_checksums import RangeChecksum
from holdfast.process.worker_threads import run_in_threads
from holdfast.storage.memory import BufferPool
from holdfast.storage.reader_pool import ReaderPool


class _ChecksumKind(NamedTuple):
    """A kind of CRC: functions that compute it, and that combine two CRCs, given the size of the second range."""

    compute: Callable[[memoryview], int]
    combine: Callable[[int, int, int], int]


_KINDS: Mapping[str, _ChecksumKind] = {
    "CRC-32": _ChecksumKind(zlib.crc32, combine_crc32),
    "CRC-64": _ChecksumKind(crc64, combine),
}


class _RangeChunk(NamedTuple):
    """Bytes of the range with this number."""

    number: int
    start: int
    stop: int


def find_corrupt_ranges(checksums: Sequence[RangeChecksum]) -> dict[int, CorruptCheckpointError]:
    """Read ranges and compare them with their checksums. Return the errors of those that differ, by number."""
    buffers, errors = BufferPool(CHUNK), dict[int, CorruptCheckpointError]()
    crcs = dict.fromkeys(range(len(checksums)), 0)
    chunks = [chunk for number, checksum in enumerate(checksums) for chunk in _split_range(number, checksum)]
    with ReaderPool() as readers:
        results = run_in_threads(lambda chunk: _compute_crc(chunk, checksums[chunk.number], readers, buffers), chunks)
    for chunk, crc in zip(chunks, results, strict=True):
        if isinstance(crc, CorruptCheckpointError):
            errors.setdefault(chunk.number, crc)
        else:
            combine_pair = _KINDS[checksums[chunk.number].kind].combine
            crcs[chunk.number] = combine_pair(crcs[chunk.number], crc, chunk.stop - chunk.start)
    for number, crc in crcs.items():
        if crc != checksums[number].crc:
            errors.setdefault(number, _mismatch_error(checksums[number]))
    return errors


def _split_range(number: int, checksum: RangeChecksum) -> list[_RangeChunk]:
    return [
        _RangeChunk(number, start, min(checksum.stop, start + CHUNK))
        for start in range(checksum.start, checksum.stop, CHUNK)
    ]


def _compute_crc(
    chunk: _RangeChunk, checksum: RangeChecksum, readers: ReaderPool, buffers: BufferPool
) -> int | CorruptCheckpointError:
    data = buffers.get()[: chunk.stop - chunk.start].data
    try:
        readers.read(checksum.file, chunk.start, data)
    except CorruptCheckpointError as error:  # the file is truncated
        return error
    return _KINDS[checksum.kind].compute(data)


def _mismatch_error(checksum: RangeChecksum) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{checksum.file} is corrupt: its bytes {checksum.start} to {checksum.stop}, {checksum.name}, "
        f"do not match their {checksum.kind}"
    )
