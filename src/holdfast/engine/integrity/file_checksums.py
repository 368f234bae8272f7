"""Compare ranges of files with their checksums: cut into pieces, read by several threads, put together."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from awscrt.checksums import combine_crc32

from holdfast.engine.io.requests import run_in_threads
from holdfast.engine.plan.file_ranges import CHUNK
from holdfast.errors import CorruptCheckpointError
from holdfast.ondisk.blocks import combine, crc64
from holdfast.ondisk.range_checksums import RangeChecksum
from holdfast.storage.memory import BufferPool
from holdfast.storage.reader_pool import ReaderPool


class _Kind(NamedTuple):
    """How a CRC is computed, and how those of neighbours become one: of the first, the second and its size."""

    compute: Callable[[memoryview], int]
    combine: Callable[[int, int, int], int]


_KINDS: Mapping[str, _Kind] = {"CRC-32": _Kind(zlib.crc32, combine_crc32), "CRC-64": _Kind(crc64, combine)}


class _Piece(NamedTuple):
    """Bytes of a range, by its number."""

    number: int
    start: int
    stop: int


def find_corrupt_ranges(sums: Sequence[RangeChecksum]) -> dict[int, CorruptCheckpointError]:
    """Read ranges and compare them with their checksums. Return what is wrong with those that differ, by number."""
    buffers, crcs, damage = BufferPool(CHUNK), dict.fromkeys(range(len(sums)), 0), dict[int, CorruptCheckpointError]()
    pieces = [piece for number, one in enumerate(sums) for piece in _cut(number, one)]
    with ReaderPool() as readers:
        found = run_in_threads(lambda piece: _compute(piece, sums[piece.number], readers, buffers), pieces)
    for piece, crc in zip(pieces, found, strict=True):
        if isinstance(crc, CorruptCheckpointError):
            damage.setdefault(piece.number, crc)
        else:
            join = _KINDS[sums[piece.number].kind].combine
            crcs[piece.number] = join(crcs[piece.number], crc, piece.stop - piece.start)
    for number, crc in crcs.items():
        if crc != sums[number].crc:
            damage.setdefault(number, _differs(sums[number]))
    return damage


def _cut(number: int, one: RangeChecksum) -> list[_Piece]:
    return [_Piece(number, start, min(one.stop, start + CHUNK)) for start in range(one.start, one.stop, CHUNK)]


def _compute(
    piece: _Piece, one: RangeChecksum, readers: ReaderPool, buffers: BufferPool
) -> int | CorruptCheckpointError:
    data = buffers.get()[: piece.stop - piece.start].data
    try:
        readers.read(one.file, piece.start, data)
    except CorruptCheckpointError as error:  # the file is cut short
        return error
    return _KINDS[one.kind].compute(data)


def _differs(one: RangeChecksum) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{one.file} is damaged: its bytes {one.start} to {one.stop}, {one.name}, do not match their {one.kind}"
    )
