"""The bytes that a request sends to an object store, with their CRC.

They may be in several pieces, so that tensors are sent from their own memory, without a copy.

:mod:`rankless.engine.io.part_assembly` and :mod:`rankless.engine.io.upload_files` make one for each part, in the thread
that sends it; the memory must not change until the request has ended, because it may be sent again.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from awscrt import checksums


class Body(msgspec.Struct, frozen=True):
    """The bytes of an object, or of a part of one: pieces of memory one after another, and the CRC-64/NVME of all."""

    pieces: tuple[memoryview, ...]
    crc64nvme: int

    @classmethod
    def of(cls, *data: bytes | memoryview) -> Body:
        """Return a body of these bytes, and compute their CRC."""
        crc = 0
        for piece in data:
            crc = checksums.crc64nvme(piece, crc)
        return cls(tuple(map(memoryview, data)), crc)

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return count_bytes(self.pieces)

    def compute_crc32c(self) -> int:
        """Return the CRC-32C of all bytes."""
        crc = 0
        for piece in self.pieces:
            crc = checksums.crc32c(piece, crc)
        return crc


def count_bytes(pieces: Iterable[memoryview]) -> int:
    """Return the total size of pieces in bytes."""
    return sum(piece.nbytes for piece in pieces)
