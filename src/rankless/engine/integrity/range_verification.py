"""Comparison of file ranges with their checksums. Several threads read the bytes that were not read before, in chunks.

Loads and conversions of formats with checksums of files call it on rank 0, in the decision of the vote on the reads;
``rankless verify`` calls it in its process.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import pairwise

from rankless.engine.integrity.read_crcs import KINDS, CrcPiece, Unread, tile_range
from rankless.engine.plan.file_ranges import CHUNK
from rankless.errors import CorruptCheckpointError, UnstableReadError
from rankless.ondisk.range_checksums import RangeChecksum
from rankless.process.worker_threads import run_in_threads
from rankless.storage.aligned_memory import BufferPool
from rankless.storage.reader_pool import ReaderPool
from rankless.storage.second_read import UncachedReader

_log = logging.getLogger("rankless")


def find_corrupt_ranges(
    checksums: Sequence[RangeChecksum], pieces: Sequence[CrcPiece] = ()
) -> dict[int, CorruptCheckpointError | UnstableReadError]:
    """Compare ranges with their checksums. Return the errors of those that differ, by number.

    ``pieces`` are the CRCs of bytes that were read. The others are read now. A range that differs is read a second
    time. If it has its checksum then, it is not corrupt: the error of bytes that a caller has read is that they were
    read wrongly, and bytes that only this function has read wrongly are no error.
    """
    wrong = set(_find_contradictions(pieces))
    errors: dict[int, CorruptCheckpointError | UnstableReadError] = {}
    crcs = dict.fromkeys(range(len(checksums)), 0)
    tiles = list(_tile_ranges(checksums, pieces))
    read = iter(_read_tiles([tile for tile in tiles if isinstance(tile, Unread)], checksums))
    for tile in tiles:
        crc = tile.crc if isinstance(tile, CrcPiece) else next(read)
        if isinstance(crc, CorruptCheckpointError):
            errors.setdefault(tile.number, crc)
        else:
            combine_pair = KINDS[checksums[tile.number].kind].combine
            crcs[tile.number] = combine_pair(crcs[tile.number], crc, tile.stop - tile.start)
    for number, crc in crcs.items():
        if crc != checksums[number].crc:
            wrong.add(number)
    read_before = {piece.number for piece in pieces}
    for number in sorted(wrong - errors.keys()):
        error = _find_cause(checksums[number], is_read_before=number in read_before)
        errors |= {number: error} if error is not None else {}
    return dict(sorted(errors.items()))


def _find_cause(checksum: RangeChecksum, *, is_read_before: bool) -> CorruptCheckpointError | UnstableReadError | None:
    """Read a range once more, past the page cache, and return its error; ``None`` if it is intact."""
    kind, crc = KINDS[checksum.kind], 0
    buffers = BufferPool(CHUNK)
    with ReaderPool(UncachedReader) as readers:
        for tile in _split_unread(Unread(0, checksum.start, checksum.stop)):
            found = _compute_crc(tile, checksum, readers, buffers)
            if isinstance(found, CorruptCheckpointError):
                return found
            crc = kind.combine(crc, found, tile.stop - tile.start)
    if crc != checksum.crc:
        return _mismatch_error(checksum)
    subject = f"bytes {checksum.start} to {checksum.stop} of {checksum.file}, {checksum.name}"
    if not is_read_before:
        _log.warning("a first read of %s was wrong, and a second one is right", subject)
        return None
    return UnstableReadError(
        f"{subject}, were read wrong, and right the second time: the file is intact; if that happens again, suspect "
        "the memory of this host"
    )


def _find_contradictions(pieces: Sequence[CrcPiece]) -> set[int]:
    """Return the numbers of ranges where two reads of the same bytes gave different results."""
    ordered = sorted(pieces)
    return {
        piece.number
        for piece, other in pairwise(ordered)
        if piece[:3] == other[:3] and piece.crc != other.crc  # number, start and stop
    }


def _tile_ranges(checksums: Sequence[RangeChecksum], pieces: Sequence[CrcPiece]) -> Iterator[CrcPiece | Unread]:
    by_number: dict[int, list[CrcPiece]] = {}
    for piece in pieces:
        by_number.setdefault(piece.number, []).append(piece)
    for number, checksum in enumerate(checksums):
        for tile in tile_range(number, checksum, by_number.get(number, ())):
            yield from [tile] if isinstance(tile, CrcPiece) else _split_unread(tile)


def _split_unread(unread: Unread) -> Iterator[Unread]:
    for start in range(unread.start, unread.stop, CHUNK):
        yield Unread(unread.number, start, min(unread.stop, start + CHUNK))


def _read_tiles(tiles: Sequence[Unread], checksums: Sequence[RangeChecksum]) -> list[int | CorruptCheckpointError]:
    buffers = BufferPool(CHUNK)
    with ReaderPool() as readers:
        return run_in_threads(lambda tile: _compute_crc(tile, checksums[tile.number], readers, buffers), tiles)


def _compute_crc(
    tile: Unread, checksum: RangeChecksum, readers: ReaderPool, buffers: BufferPool
) -> int | CorruptCheckpointError:
    data = buffers.get()[: tile.stop - tile.start].data
    try:
        readers.read(checksum.file, tile.start, data)
    except CorruptCheckpointError as error:  # the file is truncated
        return error
    return KINDS[checksum.kind].compute(data)


def _mismatch_error(checksum: RangeChecksum) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{checksum.file} is corrupt: its bytes {checksum.start} to {checksum.stop}, {checksum.name}, "
        f"do not match their {checksum.kind}"
    )
