"""One safetensors file, of ours or not: its header, and block CRCs where the header has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from holdfast.errors import CorruptCheckpointError
from holdfast.formats.reader import FileExtent
from holdfast.ondisk import blocks, header
from holdfast.ondisk.files import CRC_KEY, TIED_KEY, TensorInfo
from holdfast.ondisk.header import SafetensorsHeader, parse_json_object
from holdfast.ondisk.manifest import FileRecord
from holdfast.storage import posix
from holdfast.storage.direct_io import BufferedReader


def is_safetensors(path: Path) -> bool:
    """Whether a file begins as safetensors files do: the length of a header that it has room for, and a brace."""
    size = posix.size_of(path)
    if size <= header.LENGTH_BYTES:
        return False
    start = bytearray(header.LENGTH_BYTES + 1)
    with BufferedReader(path) as reader:
        reader.read(0, memoryview(start))
    return int.from_bytes(start[:-1], "little") <= size - header.LENGTH_BYTES and start[-1:] == b"{"


@dataclass(frozen=True)
class SafetensorsFile:
    """A file whose header has been read and checked."""

    path: Path
    header: SafetensorsHeader

    @classmethod
    def open(cls, path: Path, record: FileRecord | None = None) -> SafetensorsFile:
        """Read a header. With a ``record`` from a manifest, sizes and the header's CRC are checked against it."""
        size = posix.size_of(path)
        if record is not None and size != record.size:
            raise CorruptCheckpointError(
                f"{path} has {size} bytes, the manifest says {record.size}: it is damaged or cut short"
            )
        with BufferedReader(path) as reader:
            prefix = bytearray(min(header.LENGTH_BYTES, size))
            reader.read(0, memoryview(prefix))
            raw = bytearray(header.header_length(bytes(prefix), size, str(path)))
            reader.read(0, memoryview(raw))
        if record is not None and (
            len(raw) != record.header_size or f"{blocks.crc64(raw):016x}" != record.header_crc64nvme
        ):
            raise CorruptCheckpointError(f"the header of {path} does not match the manifest: it is damaged")
        found = cls(path, header.decode_header(bytes(raw), size, str(path)))
        if record is not None and CRC_KEY not in found.header.metadata:
            raise CorruptCheckpointError(f"the header of {path} has no {CRC_KEY}: it is damaged")
        return found

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """The tensors of the file."""
        return {name: TensorInfo(entry.dtype, entry.shape) for name, entry in self.header.entries.items()}

    @cached_property
    def tied(self) -> Mapping[str, str]:
        """``{tied name: stored name}``, as files of ours have it."""
        text = self.header.metadata.get(TIED_KEY)
        names = parse_json_object(text, f"{TIED_KEY} of {self.path}") if text else {}
        if not all(isinstance(name, str) and name in self.header.entries for name in names.values()):
            raise CorruptCheckpointError(f"{TIED_KEY} of {self.path} names a tensor that is not in the file")
        return {alias: str(name) for alias, name in names.items()}

    def extent(self, name: str, start: int, stop: int) -> FileExtent:
        """Where bytes ``[start, stop)`` of a tensor lie."""
        return FileExtent(self.path, self.header.size + self.header.entries[name].data_offsets[0] + start, start, stop)

    @cached_property
    def crcs(self) -> Mapping[str, list[int]]:
        """The CRCs of each tensor's blocks; empty where the file has none."""
        text = self.header.metadata.get(CRC_KEY)
        if text is None:
            return {}
        entries = sorted(self.header.entries.items(), key=lambda item: item[1].data_offsets)
        counts = [blocks.count_blocks(entry.nbytes) for _, entry in entries]
        try:
            row = blocks.from_hex(text)
        except ValueError as error:
            raise CorruptCheckpointError(f"{CRC_KEY} of {self.path} is {error}") from error
        if len(row) != sum(counts):
            raise CorruptCheckpointError(f"{CRC_KEY} of {self.path} has {len(row)} CRCs for {sum(counts)} blocks")
        stops = accumulate(counts)
        return {name: row[stop - count : stop] for (name, _), count, stop in zip(entries, counts, stops, strict=True)}


class SafetensorsFiles:
    """The files of one group of tensors, seen as one."""

    def __init__(self, files: list[SafetensorsFile]) -> None:
        self.files = files
        self._home = {name: file for file in files for name in file.tensors}
        if len(self._home) != sum(len(file.tensors) for file in files):
            raise CorruptCheckpointError(f"two of the files beside {files[0].path} hold a tensor of the same name")
        self.tensors = {name: file.tensors[name] for name, file in self._home.items()}
        self.tied = {alias: name for file in files for alias, name in file.tied.items()}
        if len(self.tied) != sum(len(file.tied) for file in files) or self.tied.keys() & self._home.keys():
            raise CorruptCheckpointError(
                f"a further name of a tied tensor beside {files[0].path} is that of another tensor, too"
            )

    @cached_property
    def crcs(self) -> Mapping[str, list[int]]:
        """The CRCs of each tensor's blocks, of tensors in files that have them."""
        found: dict[str, list[int]] = {}
        for file in self.files:
            found |= file.crcs
        return found

    def home(self, name: str) -> SafetensorsFile:
        """The file that holds a tensor."""
        return self._home[name]
