"""The checksums of a distributed checkpoint's records: in ``checksums.json``, else those of the zip files they are."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from holdfast.errors import CorruptCheckpointError, HoldfastError
from holdfast.formats.dcp import checksums
from holdfast.formats.dcp.checksums import ChecksumRecord, RecordChecksums
from holdfast.formats.dcp.folder import DcpDirectory
from holdfast.formats.dcp.metadata import DcpMetadata, RecordLocation
from holdfast.formats.torchfile.entry_checksums import read_entry_checksums
from holdfast.formats.torchfile.zip_reader import FileWindow
from holdfast.ondisk import blocks
from holdfast.ondisk.range_checksums import RangeChecksum
from holdfast.storage.reader_pool import ReaderPool


class RecordChecksumIndex:
    """The checksums of one folder. ``files`` are those that its metadata names."""

    def __init__(self, path: Path) -> None:
        """Raises ``HoldfastError`` if the metadata cannot be read."""
        self._folder = DcpDirectory(path, ReaderPool())
        metadata, self._raw = self._folder.read_metadata()
        self._places = dict(_places(metadata))
        self.files = {path / place.file for place in self._places}

    def find(self, wanted: Collection[Path]) -> Iterator[RangeChecksum | CorruptCheckpointError]:
        """Give the checksums of the records in these files, or what is wrong with them."""
        try:
            known = checksums.read_checksums(self._folder.path, self._raw)
        except HoldfastError as error:
            yield CorruptCheckpointError(*error.args)
            known = None
        for place, name in self._places.items():
            if self._folder.path / place.file in wanted:
                yield from self._of_record(name, place, known)

    def _of_record(
        self, name: str, place: RecordLocation, known: RecordChecksums | None
    ) -> Iterator[RangeChecksum | CorruptCheckpointError]:
        try:
            window = self._folder.window(name, place)
        except CorruptCheckpointError as error:
            yield error
            return
        yield from read_entry_checksums(window) if known is None else self._block_sums(window, name, place, known)

    def _block_sums(
        self, window: FileWindow, name: str, place: RecordLocation, known: RecordChecksums
    ) -> Iterator[RangeChecksum | CorruptCheckpointError]:
        record = next(
            (one for one in known.files.get(place.file, []) if one.offset == place.offset), ChecksumRecord(0, 0, "")
        )
        try:
            crcs = blocks.from_hex(record.crcs)
        except ValueError:
            crcs = []
        if record.size != place.size or len(crcs) != blocks.count_blocks(record.size):
            yield CorruptCheckpointError(
                f"{self._folder.path / checksums.NAME} has no checksums of {name!r} in {window.path}"
            )
            return
        for number, crc in enumerate(crcs):
            start, stop = (record.offset + at for at in blocks.block_range(number, record.size))
            yield RangeChecksum(window.path, start, stop, crc, "CRC-64", f"in the record of {name!r}")


def _places(metadata: DcpMetadata) -> Iterator[tuple[RecordLocation, str]]:
    """Records, each once: tied tensors share theirs."""
    for name, place in metadata.values.items():
        yield place, name
    for name, tensor in metadata.tensors.items():
        for place in tensor.chunks.values():
            yield place, name
