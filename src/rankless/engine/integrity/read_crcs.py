"""The CRCs of bytes that are read from file ranges with checksums, so that these need not be read once more.

Each rank of a load or conversion collects them while it reads a format with other checksums than block CRCs, such as
the entries of a ``torch.save`` file. It posts them in the vote on the reads; rank 0 compares them
(:mod:`rankless.load.torch_file_crcs`). Bytes are hashed as they were read, before a cast or an exchange.
"""

from __future__ import annotations

import threading
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from awscrt.checksums import combine_crc32

from rankless.engine.plan.file_ranges import CHUNK
from rankless.ondisk.block_crcs import combine, crc64
from rankless.ondisk.range_checksums import RangeChecksum
from rankless.process.prepared_types import prepared
from rankless.storage.direct_io import BufferedReader
from rankless.storage.reader_pool import ReaderPool


class ChecksumKind(NamedTuple):
    """A kind of CRC: functions that compute it, and that combine two CRCs, given the size of the second range."""

    compute: Callable[[memoryview], int]
    combine: Callable[[int, int, int], int]


KINDS: Mapping[str, ChecksumKind] = {
    "CRC-32": ChecksumKind(zlib.crc32, combine_crc32),
    "CRC-64": ChecksumKind(crc64, combine),
}


@prepared
class CrcPiece(NamedTuple):
    """Bytes ``[start, stop)`` of a file, inside the range with this number, and their CRC."""

    number: int
    start: int
    stop: int
    crc: int


class Unread(NamedTuple):
    """Bytes ``[start, stop)`` of a file without a known CRC, inside the range with this number."""

    number: int
    start: int
    stop: int


@prepared
class RankCrcs(msgspec.Struct, frozen=True, array_like=True):
    """The CRCs that a rank posts: fragments of blocks of tensors, and pieces of ranges of files with checksums."""

    fragments: bytes
    pieces: bytes


class ReadCrcs:
    """The CRCs of bytes that are read, by the range of ``checksums`` that they are in. These are sorted."""

    def __init__(self, checksums: Sequence[RangeChecksum]) -> None:
        self.checksums = checksums
        self._starts = [(checksum.file, checksum.start) for checksum in checksums]
        #: Pieces by number and end; and further pieces with the same number and end: bytes that were read several
        #: times.
        self._pieces: dict[tuple[int, int], CrcPiece] = {}
        self._repeated: list[CrcPiece] = []
        self._lock = threading.Lock()

    def add_bytes(self, file: Path, offset: int, data: memoryview) -> None:
        """Hash bytes that were read from ``offset`` on. Safe to call from several threads."""
        number = max(0, bisect_right(self._starts, (file, offset)) - 1)
        while number < len(self.checksums) and self._starts[number] < (file, offset + len(data)):
            checksum = self.checksums[number]
            start, stop = max(offset, checksum.start), min(offset + len(data), checksum.stop)
            if checksum.file == file and start < stop:
                crc = KINDS[checksum.kind].compute(data[start - offset : stop - offset])
                self._add_piece(CrcPiece(number, start, stop, crc))
            number += 1

    def _add_piece(self, piece: CrcPiece) -> None:
        """Add a piece, joined to the one that ends where it begins, so that there are few.

        Pieces of different chunks of the file are not joined: ranks that read the same bytes in any order have equal
        pieces, which can be compared.
        """
        with self._lock:
            before = self._pieces.get((piece.number, piece.start))
            if before is not None and before.start // CHUNK == piece.start // CHUNK:
                del self._pieces[piece.number, piece.start]
                combine_pair = KINDS[self.checksums[piece.number].kind].combine
                crc = combine_pair(before.crc, piece.crc, piece.stop - piece.start)
                piece = CrcPiece(piece.number, before.start, piece.stop, crc)
            same_end = self._pieces.get((piece.number, piece.stop))
            if same_end is not None:
                self._repeated.append(same_end)
            self._pieces[piece.number, piece.stop] = piece

    @property
    def pieces(self) -> list[CrcPiece]:
        """The CRCs of the bytes that were read."""
        return [*self._pieces.values(), *self._repeated]

    def encode(self) -> bytes:
        """Encode the pieces for other ranks."""
        return msgspec.msgpack.encode(self.pieces)


def decode_pieces(reports: Iterable[bytes]) -> list[CrcPiece]:
    """Return the pieces of all ranks, given the results of :meth:`ReadCrcs.encode`."""
    return [piece for raw in reports for piece in msgspec.msgpack.decode(raw, type=list[CrcPiece])]


def tile_range(number: int, checksum: RangeChecksum, pieces: Iterable[CrcPiece]) -> Iterator[CrcPiece | Unread]:
    """Yield the tiles of range ``number`` in order: pieces, and the gaps. Of overlapping pieces one is used."""
    at = checksum.start
    for piece in sorted(pieces):
        if piece.start < at:
            continue
        if at < piece.start:
            yield Unread(number, at, piece.start)
        yield piece
        at = piece.stop
    if at < checksum.stop:
        yield Unread(number, at, checksum.stop)


class HashingReaderPool(ReaderPool):
    """A pool of readers that adds the bytes that they read to ``crcs``."""

    def __init__(self, open_reader: Callable[[Path], BufferedReader], crcs: ReadCrcs) -> None:
        super().__init__(open_reader)
        self._crcs = crcs

    def read(self, path: Path, offset: int, into: memoryview) -> None:
        """See :class:`ReaderPool`."""
        super().read(path, offset, into)
        self._crcs.add_bytes(path, offset, into)

    def read_in_chunks(self, path: Path, offset: int, into: memoryview) -> Iterator[memoryview]:
        """See :class:`ReaderPool`."""
        for chunk in super().read_in_chunks(path, offset, into):
            self._crcs.add_bytes(path, offset, chunk)
            offset += len(chunk)
            yield chunk
