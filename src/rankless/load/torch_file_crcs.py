"""Comparison of the bytes that all ranks read with the CRC-32s in files of ``torch.save``. Own files have others.

:mod:`rankless.load.load_operation` collects on each rank in the vote "reading", and compares on rank 0 in its decision.
Pieces of one range with different CRCs must be an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from rankless.engine.integrity.range_verification import find_corrupt_ranges
from rankless.engine.integrity.read_crcs import CrcPiece, ReadCrcs, tile_range
from rankless.engine.io.tensor_sources import paths_of
from rankless.load.rank_reads import Reads
from rankless.observe.spans import traced
from rankless.ondisk.range_checksums import RangeChecksum
from rankless.process.prepared_types import prepared
from rankless.storage.store import store_of

#: A range is compared if at most the inverse of this fraction of it is missing: one rank reads that.
_SHARE = 16


@prepared
class _ReadRange(msgspec.Struct, frozen=True, array_like=True):
    """A range with a checksum, and the CRCs of the parts that a rank has read of it."""

    file: str
    start: int
    stop: int
    crc: int
    name: str
    pieces: list[tuple[int, int, int]]

    def to_checksum(self) -> RangeChecksum:
        return RangeChecksum(Path(self.file), self.start, self.stop, self.crc, "CRC-32", self.name)


def find_read_crcs(plan: Reads) -> ReadCrcs:
    """Return the checksums of the files that this rank may read. The CRCs of its reads are added to them.

    Files in object stores have none here: finding each checksum would take a request. Neither have records of
    distributed checkpoints: there may be very many of these.
    """
    # Native checkpoints have CRCs of their own, and need neither module.
    from rankless.formats.file_checksums import find_file_checksums  # noqa: PLC0415
    from rankless.formats.registry import DCP, READABLE  # noqa: PLC0415

    own = [plan.files[number] for number in sorted(plan.find_read_files())]
    paths = {path for path in paths_of(own) if not store_of(path).is_remote}
    plain = {folder for folder in {path.parent for path in paths} if not READABLE[DCP].is_at(folder)}
    return ReadCrcs(find_file_checksums(sorted(path for path in paths if path.parent in plain)).sums)


def encode_read_crcs(crcs: ReadCrcs) -> bytes:
    """Encode the CRCs of a rank's reads for rank 0."""
    by_number: dict[int, list[tuple[int, int, int]]] = {}
    for number, *piece in crcs.pieces:
        by_number.setdefault(number, []).append((piece[0], piece[1], piece[2]))
    ranges = []
    for number, pieces in by_number.items():
        file, start, stop, crc, _, name = crcs.checksums[number]
        ranges.append(_ReadRange(str(file), start, stop, crc, name, pieces))
    return msgspec.msgpack.encode(ranges)


@traced("verify files", "verify")
def check_read_crcs(reports: Iterable[bytes]) -> None:
    """Compare ranges that the ranks have read with their checksums, given all results of :func:`encode_read_crcs`.

    Missing parts of a range are read now. A range is not compared if more than a sixteenth of it is missing. Raises
    ``CorruptCheckpointError``. For example, of a range of 16 MiB at most 1 MiB may be missing.
    """
    merged: dict[RangeChecksum, list[tuple[int, int, int]]] = {}
    for raw in reports:
        for read in msgspec.msgpack.decode(raw, type=list[_ReadRange]):
            merged.setdefault(read.to_checksum(), []).extend(read.pieces)
    compared = [checksum for checksum in sorted(merged) if _is_mostly_read(checksum, merged[checksum])]
    pieces = [CrcPiece(number, *piece) for number, checksum in enumerate(compared) for piece in merged[checksum]]
    for error in find_corrupt_ranges(compared, pieces).values():
        raise error


def _is_mostly_read(checksum: RangeChecksum, pieces: Sequence[tuple[int, int, int]]) -> bool:
    tiles = tile_range(0, checksum, [CrcPiece(0, *piece) for piece in pieces])
    covered = sum(tile.stop - tile.start for tile in tiles if isinstance(tile, CrcPiece))
    size = checksum.stop - checksum.start
    return _SHARE * (size - covered) <= size
