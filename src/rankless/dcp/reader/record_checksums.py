"""The checksums of a distributed checkpoint's records: from ``checksums.json``, else of the zip file in each record.

``formats/registry.py`` names it: :mod:`rankless.formats.file_checksums` opens it for conversions, loads and ``rankless
verify``. ``checksums.json`` counts only if it belongs to the metadata that was read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from rankless.dcp.reader import checksums_json
from rankless.dcp.reader.checksums_json import ChecksumRecord, RecordChecksums
from rankless.dcp.reader.dcp_directory import DcpDirectory
from rankless.dcp.reader.dcp_metadata import DcpMetadata, RecordLocation
from rankless.errors import CorruptCheckpointError, RanklessError
from rankless.formats.torchfile.entry_checksums import read_entry_checksums
from rankless.formats.torchfile.zip_reader import FileWindow
from rankless.ondisk import block_crcs
from rankless.ondisk.range_checksums import RangeChecksum
from rankless.storage.reader_pool import ReaderPool


class RecordChecksumIndex:
    """The checksums of one folder. ``files`` are the files that its metadata names."""

    def __init__(self, path: Path) -> None:
        """Read the metadata. Raises ``RanklessError`` if it cannot be read."""
        self._folder = DcpDirectory(path, ReaderPool())
        metadata, self._raw = self._folder.read_metadata()
        self._name_by_location = dict(_record_locations(metadata))
        self.files = {path / location.file for location in self._name_by_location}

    def find_checksums(self, files: Collection[Path]) -> Iterator[RangeChecksum | CorruptCheckpointError]:
        """Yield the checksums of the records in ``files``, and an error for each record with invalid checksums."""
        try:
            stored = checksums_json.read_checksums(self._folder.path, self._raw)
        except RanklessError as error:
            yield CorruptCheckpointError(*error.args)
            stored = None
        for location, name in self._name_by_location.items():
            if self._folder.path / location.file in files:
                yield from self._checksums_of(name, location, stored)

    def _checksums_of(
        self, name: str, location: RecordLocation, stored: RecordChecksums | None
    ) -> Iterator[RangeChecksum | CorruptCheckpointError]:
        try:
            window = self._folder.record_window(name, location)
        except CorruptCheckpointError as error:
            yield error
            return
        if stored is None:
            yield from read_entry_checksums(window)
        else:
            yield from self._block_checksums(window, name, location, stored)

    def _block_checksums(
        self, window: FileWindow, name: str, location: RecordLocation, stored: RecordChecksums
    ) -> Iterator[RangeChecksum | CorruptCheckpointError]:
        records = stored.files.get(location.file, [])
        record = next((record for record in records if record.offset == location.offset), ChecksumRecord(0, 0, ""))
        try:
            crcs = block_crcs.from_hex(record.crcs)
        except ValueError:
            crcs = []
        if record.size != location.size or len(crcs) != block_crcs.count_blocks(record.size):
            yield CorruptCheckpointError(f"{self._folder.path} has no valid checksums of {name!r} in {window.path}")
            return
        for number, crc in enumerate(crcs):
            start, stop = (record.offset + at for at in block_crcs.block_range(number, record.size))
            yield RangeChecksum(window.path, start, stop, crc, "CRC-64", f"in the record of {name!r}")


def _record_locations(metadata: DcpMetadata) -> Iterator[tuple[RecordLocation, str]]:
    """Yield the location of each record with its name. Tied tensors share a record, which comes up several times."""
    for name, location in metadata.values.items():
        yield location, name
    for name, tensor in metadata.tensors.items():
        for location in tensor.chunks.values():
            yield location, name
