"""A DCP folder that is open for reading: its records. Each is a chunk of a tensor, or a value.

:class:`~rankless.dcp.storage_reader.FileSystemReader` opens one on each rank when torch asks for the metadata, and
reads with it in the thread of ``dcp.load``. Values are read without running their pickle.
"""

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

from rankless.dcp.reader import checksums_json
from rankless.dcp.reader import dcp_metadata as metadata
from rankless.dcp.reader.checksums_json import VerifiedReader
from rankless.dcp.reader.dcp_directory import DcpDirectory, locate_chunk
from rankless.dcp.reader.dcp_metadata import RecordLocation
from rankless.errors import FormatError, MismatchError
from rankless.formats.pickles.builtin_types import BYTES_IO, read_bytes_io
from rankless.formats.pickles.unpickler import OpaqueObject
from rankless.formats.torchfile import archive
from rankless.formats.torchfile.zip_reader import FileRangeReader, FileWindow
from rankless.formats.tree.tree_contents import as_user_content
from rankless.formats.tree.tree_reader import TreeReader
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.dtypes import dtype_width
from rankless.ondisk.read_budget import ReadBudget
from rankless.state.tensor_views import DTYPES
from rankless.storage.reader_pool import ReaderPool
from rankless.view import Checkpoint

#: Identifies a record: a flat name and, for a chunk, its offset in its tensor.
_RecordKey = tuple[str, tuple[int, ...] | None]


class _Record(NamedTuple):
    """The location of a record in its file, and the dtype and shape of the chunk (``None`` for a value)."""

    info: TensorInfo | None
    location: RecordLocation


@dataclass(frozen=True)
class DcpFolder:
    """The metadata of a folder, and the readers for its files."""

    folder: DcpDirectory
    dcp_metadata: metadata.DcpMetadata
    readers: FileRangeReader
    records: Mapping[_RecordKey, _Record]

    @classmethod
    def open_folder(cls, path: Path, *, verify: bool) -> DcpFolder:
        """Open a folder.

        Raises ``CorruptCheckpointError`` if the metadata is invalid or does not belong to the checksums,
        ``FormatError`` for a tensor that rankless cannot read.
        """
        pool = ReaderPool()
        dcp_metadata, raw = DcpDirectory(path, pool).read_metadata()
        for name, tensor in dcp_metadata.unreadable.items():
            raise FormatError(f"{path}: tensor {name!r} {tensor.why}")
        file_checksums = checksums_json.read_checksums(path, raw) if verify else None
        readers: FileRangeReader = pool if file_checksums is None else VerifiedReader(pool, path, file_checksums.files)
        return cls(DcpDirectory(path, readers), dcp_metadata, readers, dict(_list_records(dcp_metadata)))

    def build_metadata(self) -> Metadata:
        """Return the metadata as torch's ``Metadata``.

        Raises ``CorruptCheckpointError`` if it is incomplete or does not match the files.
        """
        entries: dict[str, Any] = {}
        self.folder.check_overlaps(self.dcp_metadata)
        for name, location in self.dcp_metadata.values.items():
            self.folder.record_window(name, location)
            entries[name] = BytesStorageMetadata()
        for name, tensor in self.dcp_metadata.tensors.items():
            self.folder.build_tensor(name, tensor)
            chunks = [ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)) for box in tensor.chunks]
            properties = TensorProperties(DTYPES[tensor.info.dtype])
            entries[name] = TensorStorageMetadata(properties, torch.Size(tensor.info.shape), chunks)
        storage_data = {
            MetadataIndex(name, None if offset is None else torch.Size(offset)): _StorageInfo(*record.location)
            for (name, offset), record in self.records.items()
        }
        metadata = Metadata(entries, dict(self.dcp_metadata.paths), storage_data)
        metadata.version = self.dcp_metadata.version  # no argument before torch 2.9
        return metadata

    def locate_record(self, item: ReadItem) -> RecordLocation:
        """Return the location of the record that an item reads."""
        return self._find_record(item).location

    def read_tensor(self, item: ReadItem) -> torch.Tensor:
        """Read the box of a chunk that an item asks for.

        Reads the bytes from the box's first element to its last, and returns a strided view of them. Raises
        ``MismatchError`` if the record is not a tensor.
        """
        name, info = item.storage_index.fqn, self._find_record(item).info
        if info is None:
            raise MismatchError(f"{name!r} is a tensor here, but a value in {self.folder.path}")
        stored, size = locate_chunk(name, info, self.open_window(item)), dtype_width(info.dtype)
        first = stored.offset + sum(map(mul, item.storage_offsets, stored.strides))
        span_bytes = (
            sum((length - 1) * stride for length, stride in zip(item.lengths, stored.strides, strict=True)) + size
        )
        data = torch.empty(span_bytes if item.lengths.numel() else 0, dtype=torch.uint8, device="cpu")
        self.readers.read(stored.file, first, data.numpy().data)
        return data.view(DTYPES[info.dtype]).as_strided(item.lengths, [stride // size for stride in stored.strides])

    def read_value(self, item: ReadItem) -> bytes:
        """Return the pickle of a value: plain types, or an in-memory file.

        The value is read without running code, and pickled anew, because torch will unpickle it.
        """
        window = self.open_window(item)
        window.read(0, window.size)  # verifies the whole record if there are checksums
        budget = ReadBudget()
        tree = archive.read_archive(window, budget)
        if isinstance(tree.root, OpaqueObject) and tree.root.name == BYTES_IO:
            content: Any = io.BytesIO(read_bytes_io(tree.root))
        else:
            contents = as_user_content(tree.root, budget, window.label)
            reader = TreeReader(window.path, "dcp", [window.path], "", contents, notes_versions=False)
            content = Checkpoint(reader).values["user_content"]
        stream = io.BytesIO()
        torch.save(content, stream)
        return stream.getvalue()

    def open_window(self, item: ReadItem) -> FileWindow:
        """Return the bytes of the record that an item reads."""
        return self.folder.record_window(item.storage_index.fqn, self.locate_record(item))

    def _find_record(self, item: ReadItem) -> _Record:
        index = item.storage_index
        return self.records[index.fqn, None if index.offset is None else tuple(index.offset)]


def _list_records(dcp_metadata: metadata.DcpMetadata) -> Iterator[tuple[_RecordKey, _Record]]:
    for name, location in dcp_metadata.values.items():
        yield (name, None), _Record(None, location)
    for name, tensor in dcp_metadata.tensors.items():
        for box, location in tensor.chunks.items():
            yield (name, box.offset), _Record(TensorInfo(tensor.info.dtype, box.shape), location)
