"""The file ``checksums.json`` in a distributed checkpoint, which rankless writes and verifies and torch ignores.

In an object store its name has the CRC of the metadata: two objects cannot be replaced in one step, so a save may not
replace the checksums of the checkpoint that is there.

It has the CRCs of the records: a record is a range of a file that the metadata gives by offset and length, and each
block of 16 MiB of it has a CRC.

:mod:`rankless.dcp.storage_writer` writes it on rank 0, readers of the format verify with it. Its form is stored: do not
change it without a new version.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from rankless.errors import CorruptCheckpointError, FormatError
from rankless.formats.torchfile.zip_reader import FileRangeReader, FileWindow
from rankless.ondisk import block_crcs
from rankless.process.prepared_types import prepared
from rankless.storage.store import store_of

NAME = "checksums.json"

_FORMAT, _VERSION = "rankless-dcp-checksums", 1


class ChecksumRecord(NamedTuple):
    """The CRCs of bytes ``[offset, offset + size)`` of a file: ``crcs`` joins its blocks' CRCs, in hexadecimal."""

    offset: int
    size: int
    crcs: str


@prepared
class RecordChecksums(msgspec.Struct, frozen=True):
    """The contents of ``checksums.json``: the CRC of the metadata, and the records of each file by offset."""

    format: str
    version: int
    metadata: str
    files: dict[str, list[ChecksumRecord]]


def name_checksums(metadata: bytes) -> str:
    """Return the name of the file that has the checksums of one checkpoint only.

    It has the CRC of the metadata, for example ``checksums-0123456789abcdef.json``.
    """
    return f"checksums-{block_crcs.crc64(metadata):016x}.json"


def find_checksums(folder: Path, metadata: bytes) -> Path | None:
    """Return the path of the file with the checksums of a folder; ``None`` if it has none."""
    files = (folder / name_checksums(metadata), folder / NAME)
    return next((file for file in files if store_of(file).file_exists(file)), None)


def encode_checksums(metadata: bytes, files: Mapping[str, Sequence[ChecksumRecord]]) -> bytes:
    """Return the contents of ``checksums.json``.

    Rank 0 calls it in torch's ``finish``.
    """
    ordered = {name: sorted(records) for name, records in sorted(files.items())}
    return msgspec.json.encode(RecordChecksums(_FORMAT, _VERSION, f"{block_crcs.crc64(metadata):016x}", ordered))


def read_checksums(folder: Path, metadata: bytes) -> RecordChecksums | None:
    """Return the checksums of a folder, or ``None`` if it has none.

    Raises ``CorruptCheckpointError`` if they belong to other metadata, ``FormatError`` if their version is unknown.
    """
    file = find_checksums(folder, metadata)
    if file is None:
        return None
    store_of(file).check_regular(file, within=(folder,))
    checksums = decode_checksums(file)
    if checksums.metadata != f"{block_crcs.crc64(metadata):016x}":
        raise CorruptCheckpointError(
            f"{folder / '.metadata'} does not match {file.name}: it is corrupt, or torch has written another "
            f"checkpoint into the folder; if so, remove {file.name}"
        )
    return checksums


def decode_checksums(file: Path) -> RecordChecksums:
    """Read a file with checksums. Raises ``CorruptCheckpointError``, ``FormatError`` if its version is unknown."""
    try:
        checksums = msgspec.json.decode(store_of(file).read_small(file), type=RecordChecksums)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptCheckpointError(f"{file} cannot be read as checksums: {error}") from error
    if (checksums.format, checksums.version) != (_FORMAT, _VERSION):
        raise FormatError(
            f"{file} has format {checksums.format!r:.40} version {checksums.version}, which this rankless does not "
            "read; update rankless"
        )
    return checksums


class VerifiedReader:
    """A reader of records of a folder. It reads whole blocks. Each must match its CRC."""

    def __init__(self, readers: FileRangeReader, folder: Path, files: Mapping[str, Sequence[ChecksumRecord]]) -> None:
        self._readers, self._folder, self._files = readers, folder, files
        self._last: tuple[tuple[Path, ChecksumRecord, int], memoryview] | None = None

    def read(self, path: Path, offset: int, into: memoryview) -> None:
        """Fill ``into`` from ``offset`` on; all of these bytes must be in one record.

        Raises ``CorruptCheckpointError``, naming the file and the bytes, if they do not match their CRC.
        """
        record = self._find_record(path, offset, len(into))
        at, end = offset - record.offset, offset - record.offset + len(into)
        for block in range(at // block_crcs.BLOCK_BYTES, block_crcs.count_blocks(end)):
            start, stop = block_crcs.block_range(block, record.size)
            data = self._read_block(path, record, block)
            low, high = max(at, start), min(end, stop)
            into[low - at : high - at] = data[low - start : high - start]

    def _find_record(self, path: Path, offset: int, size: int) -> ChecksumRecord:
        records = self._files.get(str(path.relative_to(self._folder)), [])
        number = bisect.bisect_right(records, offset, key=lambda record: record.offset) - 1
        record = records[number] if number >= 0 else ChecksumRecord(0, 0, "")
        if not record.offset <= offset <= offset + size <= record.offset + record.size:
            raise CorruptCheckpointError(
                f"the checksums of {self._folder} do not cover bytes {offset} to {offset + size} of {path}"
            )
        return record

    def _read_block(self, path: Path, record: ChecksumRecord, block: int) -> memoryview:
        key = (path, record, block)
        if self._last is None or self._last[0] != key:
            start, stop = block_crcs.block_range(block, record.size)
            data = memoryview(bytearray(stop - start))
            self._readers.read(path, record.offset + start, data)
            if (
                f"{block_crcs.crc64(data):016x}"
                != record.crcs[block * block_crcs.DIGITS : (block + 1) * block_crcs.DIGITS]
            ):
                first = record.offset + start
                raise CorruptCheckpointError(
                    f"{path} is corrupt: its bytes {first} to {first + len(data)} do not match their CRC"
                )
            self._last = key, data
        return self._last[1]


def check_checksums(
    window: FileWindow, readers: FileRangeReader, folder: Path, files: Mapping[str, Sequence[ChecksumRecord]]
) -> None:
    """Raise ``CorruptCheckpointError`` if a record does not match its CRCs."""
    replace(window, readers=VerifiedReader(readers, folder, files)).read(0, window.size)
