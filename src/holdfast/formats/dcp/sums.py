"""The checksums of a distributed checkpoint's records: in ``checksums.json``, else those of the zip files they are."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from holdfast.errors import DamagedError, HoldfastError
from holdfast.formats.dcp import checksums
from holdfast.formats.dcp.checksums import Checksums, Record
from holdfast.formats.dcp.folder import Folder
from holdfast.formats.dcp.metadata import Metadata, Place
from holdfast.formats.torchfile.crc32 import entry_sums
from holdfast.formats.torchfile.zips import Window
from holdfast.layout import blocks
from holdfast.layout.sums import Sum
from holdfast.storage.readers import Readers


class RecordSums:
    """The checksums of one folder. ``files`` are those that its metadata names."""

    def __init__(self, path: Path) -> None:
        """Raises ``HoldfastError`` if the metadata cannot be read."""
        self._folder = Folder(path, Readers())
        metadata, self._raw = self._folder.read_metadata()
        self._places = dict(_places(metadata))
        self.files = {path / place.file for place in self._places}

    def find(self, wanted: Collection[Path]) -> Iterator[Sum | DamagedError]:
        """Give the checksums of the records in these files, or what is wrong with them."""
        try:
            known = checksums.read(self._folder.path, self._raw)
        except HoldfastError as error:
            yield DamagedError(*error.args)
            known = None
        for place, name in self._places.items():
            if self._folder.path / place.file in wanted:
                yield from self._of_record(name, place, known)

    def _of_record(self, name: str, place: Place, known: Checksums | None) -> Iterator[Sum | DamagedError]:
        try:
            window = self._folder.window(name, place)
        except DamagedError as error:
            yield error
            return
        yield from entry_sums(window) if known is None else self._block_sums(window, name, place, known)

    def _block_sums(self, window: Window, name: str, place: Place, known: Checksums) -> Iterator[Sum | DamagedError]:
        record = next((one for one in known.files.get(place.file, []) if one.offset == place.offset), Record(0, 0, ""))
        try:
            crcs = blocks.from_hex(record.crcs)
        except ValueError:
            crcs = []
        if record.size != place.size or len(crcs) != blocks.count(record.size):
            yield DamagedError(f"{self._folder.path / checksums.NAME} has no checksums of {name!r} in {window.path}")
            return
        for number, crc in enumerate(crcs):
            start, stop = (record.offset + at for at in blocks.span(number, record.size))
            yield Sum(window.path, start, stop, crc, "CRC-64", f"in the record of {name!r}")


def _places(metadata: Metadata) -> Iterator[tuple[Place, str]]:
    """Records, each once: tied tensors share theirs."""
    for name, place in metadata.values.items():
        yield place, name
    for name, tensor in metadata.tensors.items():
        for place in tensor.chunks.values():
            yield place, name
