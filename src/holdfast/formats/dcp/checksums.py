"""CRCs of a distributed checkpoint's records, in a file beside them: torch does not look at it, and holdfast verifies.

A record is what the metadata has an offset and a length of; each block of 16 MiB of one has a CRC.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from holdfast.errors import CorruptCheckpointError, FormatError
from holdfast.formats.torchfile.zip_reader import FileWindow, RangeReader
from holdfast.ondisk import blocks
from holdfast.storage import posix

NAME = "checksums.json"

_FORMAT, _VERSION = "holdfast-dcp-checksums", 1


class ChecksumRecord(NamedTuple):
    """Bytes ``[offset, offset + size)`` of a file; ``crcs`` is one CRC after another, in hexadecimal digits."""

    offset: int
    size: int
    crcs: str


class RecordChecksums(msgspec.Struct, frozen=True):
    """The CRC of the metadata, and the records of each file, in their order."""

    format: str
    version: int
    metadata: str
    files: dict[str, list[ChecksumRecord]]


def encode_checksums(metadata: bytes, files: Mapping[str, Sequence[ChecksumRecord]]) -> bytes:
    """The contents of the file."""
    found = {name: sorted(records) for name, records in sorted(files.items())}
    return msgspec.json.encode(RecordChecksums(_FORMAT, _VERSION, f"{blocks.crc64(metadata):016x}", found))


def read_checksums(folder: Path, metadata: bytes) -> RecordChecksums | None:
    """What a folder has of them, if any. Raises ``CorruptCheckpointError`` where they are of another checkpoint."""
    file = folder / NAME
    if not posix.is_taken(file):
        return None
    posix.check_regular(file, within=(folder,))
    try:
        found = msgspec.json.decode(posix.read_small(file), type=RecordChecksums)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptCheckpointError(f"{file} holds no checksums: {error}") from error
    if (found.format, found.version) != (_FORMAT, _VERSION):
        raise FormatError(f"{file} is of version {found.version} of {found.format!r:.40}, which is not known here")
    if found.metadata != f"{blocks.crc64(metadata):016x}":
        raise CorruptCheckpointError(
            f"{folder / '.metadata'} does not match {NAME}: it is damaged, or torch has written another checkpoint "
            f"into the folder; remove {NAME} if that is so"
        )
    return found


class VerifiedReader:
    """Reads records of a folder in whole blocks, each of which must match its CRC."""

    def __init__(self, readers: RangeReader, folder: Path, files: Mapping[str, Sequence[ChecksumRecord]]) -> None:
        self._readers, self._folder, self._files = readers, folder, files
        self._last: tuple[tuple[Path, ChecksumRecord, int], memoryview] | None = None

    def read(self, path: Path, offset: int, into: memoryview) -> None:
        """Fill ``into``, which lies inside a record. Raises ``CorruptCheckpointError`` naming the file and the bytes."""
        record = self._record(path, offset, len(into))
        at, end = offset - record.offset, offset - record.offset + len(into)
        for block in range(at // blocks.BLOCK_BYTES, blocks.count_blocks(end)):
            start, stop = blocks.block_range(block, record.size)
            data = self._block(path, record, block)
            low, high = max(at, start), min(end, stop)
            into[low - at : high - at] = data[low - start : high - start]

    def _record(self, path: Path, offset: int, size: int) -> ChecksumRecord:
        records = self._files.get(str(path.relative_to(self._folder)), [])
        number = bisect.bisect_right(records, offset, key=lambda record: record.offset) - 1
        record = records[number] if number >= 0 else ChecksumRecord(0, 0, "")
        if not record.offset <= offset <= offset + size <= record.offset + record.size:
            raise CorruptCheckpointError(
                f"{self._folder / NAME} has no checksum of bytes {offset} to {offset + size} of {path}"
            )
        return record

    def _block(self, path: Path, record: ChecksumRecord, block: int) -> memoryview:
        key = (path, record, block)
        if self._last is None or self._last[0] != key:
            start, stop = blocks.block_range(block, record.size)
            data = memoryview(bytearray(stop - start))
            self._readers.read(path, record.offset + start, data)
            if f"{blocks.crc64(data):016x}" != record.crcs[block * blocks.DIGITS : (block + 1) * blocks.DIGITS]:
                first = record.offset + start
                raise CorruptCheckpointError(
                    f"{path} is damaged: its bytes {first} to {first + len(data)} do not match their CRC"
                )
            self._last = key, data
        return self._last[1]


def check_checksums(
    window: FileWindow, readers: RangeReader, folder: Path, files: Mapping[str, Sequence[ChecksumRecord]]
) -> None:
    """Raise ``CorruptCheckpointError`` where a record does not match its CRCs."""
    replace(window, readers=VerifiedReader(readers, folder, files)).read(0, window.size)
