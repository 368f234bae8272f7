"""A folder that is open for reading: its records, each of which is a chunk of a tensor or a value."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from holdfast.errors import FormatError, MismatchError
from holdfast.formats.dcp import checksums, metadata
from holdfast.formats.dcp.checksums import VerifiedReader
from holdfast.formats.dcp.folder import DcpDirectory, chunk_at
from holdfast.formats.dcp.metadata import RecordLocation
from holdfast.formats.pickles.builtin_types import BYTES_IO, count_bytes
from holdfast.formats.pickles.unpickler import OpaqueObject
from holdfast.formats.torchfile import archive
from holdfast.formats.torchfile.zip_reader import FileWindow, RangeReader
from holdfast.formats.tree.contents import as_user_content
from holdfast.formats.tree.tree_reader import TreeReader
from holdfast.ondisk.dtypes import dtype_width
from holdfast.ondisk.files import TensorInfo
from holdfast.ondisk.read_budget import ReadBudget
from holdfast.state.tensors import DTYPES
from holdfast.storage.reader_pool import ReaderPool
from holdfast.view import Checkpoint

#: What tells records apart: a flat name and, for a chunk, where in its tensor it begins.
_Key = tuple[str, tuple[int, ...] | None]


class _Record(NamedTuple):
    """What is in it, where that is a chunk, and where it lies."""

    info: TensorInfo | None
    place: RecordLocation


@dataclass(frozen=True)
class DcpFolder:
    """What a folder holds by its metadata, and what reads it."""

    folder: DcpDirectory
    found: metadata.DcpMetadata
    readers: RangeReader
    records: Mapping[_Key, _Record]

    @classmethod
    def of(cls, path: Path, *, verify: bool) -> DcpFolder:
        """Open a folder.

        Raises ``CorruptCheckpointError`` where the metadata is none, or not that of the checksums, ``FormatError`` for a tensor
        that holdfast does not read.
        """
        plain = ReaderPool()
        found, raw = DcpDirectory(path, plain).read_metadata()
        for name, tensor in found.unreadable.items():
            raise FormatError(f"{path}: tensor {name!r} {tensor.why}")
        known = checksums.read_checksums(path, raw) if verify else None
        readers: RangeReader = plain if known is None else VerifiedReader(plain, path, known.files)
        return cls(DcpDirectory(path, readers), found, readers, dict(_records(found)))

    def metadata(self) -> Metadata:
        """As torch has it. Raises ``CorruptCheckpointError`` where it is not whole, or the files are not what it says."""
        entries: dict[str, Any] = {}
        self.folder.check_overlaps(self.found)
        for name, place in self.found.values.items():
            self.folder.window(name, place)
            entries[name] = BytesStorageMetadata()
        for name, tensor in self.found.tensors.items():
            self.folder.tensor(name, tensor)
            chunks = [ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)) for box in tensor.chunks]
            properties = TensorProperties(DTYPES[tensor.info.dtype])
            entries[name] = TensorStorageMetadata(properties, torch.Size(tensor.info.shape), chunks)
        places = {
            MetadataIndex(name, None if offset is None else torch.Size(offset)): _StorageInfo(*record.place)
            for (name, offset), record in self.records.items()
        }
        return Metadata(entries, dict(self.found.paths), places)

    def place(self, item: ReadItem) -> RecordLocation:
        """Where what is to be read lies."""
        return self._record(item).place

    def tensor(self, item: ReadItem) -> torch.Tensor:
        """A box of a chunk: the bytes from its first element to its last are read, and seen as it."""
        name, info = item.storage_index.fqn, self._record(item).info
        if info is None:
            raise MismatchError(f"{name!r} is a tensor here, and none in {self.folder.path}")
        there, size = chunk_at(name, info, self.window(item)), dtype_width(info.dtype)
        first = there.offset + sum(map(mul, item.storage_offsets, there.strides))
        reach = sum((length - 1) * stride for length, stride in zip(item.lengths, there.strides, strict=True)) + size
        data = torch.empty(reach if item.lengths.numel() else 0, dtype=torch.uint8)
        self.readers.read(there.file, first, data.numpy().data)
        return data.view(DTYPES[info.dtype]).as_strided(item.lengths, [stride // size for stride in there.strides])

    def value(self, item: ReadItem) -> bytes:
        """The pickle of a value of plain types, or of a file in memory: ours, as torch will run what it is given."""
        window = self.window(item)
        window.read(0, window.size)  # all of it is verified, where there are checksums
        budget = ReadBudget()
        tree = archive.read_archive(window, budget)
        if isinstance(tree.root, OpaqueObject) and tree.root.name == BYTES_IO:
            content: Any = io.BytesIO(count_bytes(tree.root))
        else:
            reader = TreeReader(window.path, "dcp", [window.path], "", as_user_content(tree.root, budget, window.label))
            content = Checkpoint(reader).values["user_content"]
        stream = io.BytesIO()
        torch.save(content, stream)
        return stream.getvalue()

    def window(self, item: ReadItem) -> FileWindow:
        """The record of what is to be read."""
        return self.folder.window(item.storage_index.fqn, self.place(item))

    def _record(self, item: ReadItem) -> _Record:
        index = item.storage_index
        return self.records[index.fqn, None if index.offset is None else tuple(index.offset)]


def _records(found: metadata.DcpMetadata) -> Iterator[tuple[_Key, _Record]]:
    for name, place in found.values.items():
        yield (name, None), _Record(None, place)
    for name, tensor in found.tensors.items():
        for box, place in tensor.chunks.items():
            yield (name, box.offset), _Record(TensorInfo(tensor.info.dtype, box.shape), place)
