"""Reading safetensors files: the header, and the block CRCs if rankless wrote them into it.

Readers of this and other systems open files with it, on each rank that needs their headers; clean-ups ask
:func:`has_our_checksums` before they remove a file. A file is checked against its record in the manifest before
anything in its header is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import msgspec

from rankless.errors import CorruptCheckpointError, FormatError
from rankless.formats.reader import FileExtent
from rankless.ondisk import block_crcs, header
from rankless.ondisk.data_files import CRC_KEY, TIED_KEY, TensorInfo, intern_info
from rankless.ondisk.header import SafetensorsHeader, parse_json_object
from rankless.ondisk.manifest import FileRecord
from rankless.process.gc_pause import gc_paused
from rankless.storage.store import store_of


def has_our_checksums(path: Path) -> bool:
    """Return whether rankless has written a file: other libraries write no checksums into it."""
    try:
        return CRC_KEY in SafetensorsFile.open(path).header.metadata
    except (CorruptCheckpointError, FormatError):
        return False


def is_safetensors(path: Path) -> bool:
    """Return whether a file begins as safetensors files do: a header length that fits into the file, then a brace."""
    start = bytearray(header.LENGTH_BYTES + 1)
    with store_of(path).open_reader(path) as reader:
        size = reader.size
        if size <= header.LENGTH_BYTES:
            return False
        reader.read(0, memoryview(start))
    return int.from_bytes(start[:-1], "little") <= size - header.LENGTH_BYTES and start[-1:] == b"{"


def read_raw_header(path: Path, record: FileRecord | None = None) -> tuple[bytes, int, str]:
    """Return the bytes of a file before its data, its size, and without a ``record`` its version.

    The size of a ``record`` is checked.
    """
    with store_of(path).open_reader(path) as reader:
        size = reader.size
        if record is not None and size != record.size:
            raise CorruptCheckpointError(
                f"{path} has {size} bytes, the manifest says {record.size}: the file is corrupt or truncated"
            )
        prefix = bytearray(min(header.LENGTH_BYTES, size))
        reader.read(0, memoryview(prefix))
        raw = bytearray(header.header_length(bytes(prefix), size, str(path)))
        reader.read(0, memoryview(raw))
        return bytes(raw), size, reader.version if record is None else ""


class SafetensorsFile(msgspec.Struct, frozen=True, dict=True):
    """A safetensors file after its header was read and checked."""

    path: Path
    header: SafetensorsHeader
    #: The version of the file when its header was read: see :meth:`rankless.storage.store.Store.file_version`. It is
    #: empty for a file of a checkpoint with a manifest: the manifest says whether that is current.
    version: str = ""

    def is_current(self) -> bool:
        """Return whether the path has the same file as when the header was read, with the same bytes."""
        return store_of(self.path).file_version(self.path) == self.version

    @classmethod
    def open(cls, path: Path, record: FileRecord | None = None) -> SafetensorsFile:
        """Read the header of a file.

        With a ``record`` from a manifest, its sizes and CRC are checked. Raises ``CorruptCheckpointError``.
        """
        raw, size, version = read_raw_header(path, record)
        if record is not None and (
            len(raw) != record.header_size or f"{block_crcs.crc64(raw):016x}" != record.header_crc64nvme
        ):
            raise CorruptCheckpointError(f"the header of {path} does not match the manifest: the file is corrupt")
        with gc_paused():
            file = cls(path, header.decode_header(raw, size, str(path)), version)
        if record is not None and CRC_KEY not in file.header.metadata:
            raise CorruptCheckpointError(f"the header of {path} has no {CRC_KEY}: the file is corrupt")
        return file

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """The tensors of the file."""
        return {name: intern_info(entry.dtype, entry.shape) for name, entry in self.header.entries.items()}

    @cached_property
    def tied(self) -> Mapping[str, str]:
        """The further names of tied tensors, ``{tied name: stored name}``; only files of rankless have any."""
        text = self.header.metadata.get(TIED_KEY)
        names = parse_json_object(text, f"{TIED_KEY} of {self.path}") if text else {}
        if not all(isinstance(name, str) and name in self.header.entries for name in names.values()):
            raise CorruptCheckpointError(
                f"{self.path}: {TIED_KEY} in the header names a tensor that is not in the file"
            )
        return {alias: str(name) for alias, name in names.items()}

    def tensor_extent(self, name: str, start: int, stop: int) -> FileExtent:
        """Return the file range of bytes ``[start, stop)`` of a tensor."""
        return FileExtent(self.path, self.header.size + self.header.entries[name].data_offsets[0] + start, start, stop)

    @cached_property
    def crcs(self) -> Mapping[str, list[int]]:
        """The CRCs of each tensor's blocks; empty if the file has none."""
        text = self.header.metadata.get(CRC_KEY)
        if text is None:
            return {}
        entries = sorted(self.header.entries.items(), key=lambda item: item[1].data_offsets)
        counts = [block_crcs.count_blocks(entry.nbytes) for _, entry in entries]
        try:
            crcs = block_crcs.from_hex(text)
        except ValueError as error:
            raise CorruptCheckpointError(f"{self.path}: {CRC_KEY} in the header is {error}") from error
        if len(crcs) != sum(counts):
            raise CorruptCheckpointError(
                f"{self.path}: {CRC_KEY} in the header has {len(crcs)} CRCs, but the tensors have {sum(counts)} blocks"
            )
        stops = accumulate(counts)
        return {name: crcs[stop - count : stop] for (name, _), count, stop in zip(entries, counts, stops, strict=True)}


class SafetensorsFiles:
    """The files of one group of tensors. Every name is in one file only; else ``CorruptCheckpointError`` is raised."""

    def __init__(self, files: list[SafetensorsFile]) -> None:
        self.files = files
        self._file_by_name: dict[str, SafetensorsFile] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for file in files:
            self._file_by_name |= dict.fromkeys(file.tensors, file)
            self.tensors |= file.tensors
        if len(self.tensors) != sum(len(file.tensors) for file in files):
            raise CorruptCheckpointError(f"two files of the group of {files[0].path} hold a tensor of the same name")
        self.tied = {alias: name for file in files for alias, name in file.tied.items()}
        if len(self.tied) != sum(len(file.tied) for file in files) or self.tied.keys() & self._file_by_name.keys():
            raise CorruptCheckpointError(
                f"{files[0].path} or a file of its group: a further name of a tied tensor is also the name of another "
                "tensor"
            )

    @cached_property
    def crcs(self) -> Mapping[str, list[int]]:
        """The CRCs of each tensor's blocks, for the files that have CRCs."""
        crcs: dict[str, list[int]] = {}
        for file in self.files:
            crcs |= file.crcs
        return crcs

    def file_of(self, name: str) -> SafetensorsFile:
        """Return the file that holds a tensor."""
        return self._file_by_name[name]
