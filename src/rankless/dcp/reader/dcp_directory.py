"""Reading a folder of ``torch.distributed.checkpoint``: its metadata, and the saved tree with tensors in chunks.

Readers of Accelerate, Lightning, Megatron and DCP call :func:`read_tree`, each on each rank that opens a checkpoint;
:mod:`rankless.run.ownership` asks :func:`find_owned_files` on rank 0 before a folder is replaced: a name too many in it
would remove a file of the user's. Writers of DCP's files and torchtitan ask whether a folder is one. A chunk is checked
against its file before it is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rankless.dcp.reader import checksums_json
from rankless.dcp.reader import dcp_metadata as metadata
from rankless.dcp.reader.dcp_metadata import DCP_LOAD, DcpMetadata, RecordLocation
from rankless.dcp.reader.unflatten import unflatten
from rankless.engine.io import tensor_sources
from rankless.engine.io.tensor_sources import SourceChunk
from rankless.engine.plan.element_ranges import IndexBox
from rankless.errors import CorruptCheckpointError, UnsafePickleError
from rankless.formats.chunked_tensor import ChunkedTensor
from rankless.formats.stored_tensor import UnreadTensor
from rankless.formats.tiling import LEAST, check_tiling
from rankless.formats.torchfile import archive
from rankless.formats.torchfile.allowed_globals import NAMES
from rankless.formats.torchfile.torch_placeholders import TorchTensor
from rankless.formats.torchfile.zip_reader import FileRangeReader, FileWindow
from rankless.ondisk.block_crcs import crc64
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.read_budget import ReadBudget
from rankless.ondisk.validation import check_relative_path
from rankless.storage.reader_pool import ReaderPool
from rankless.storage.store import store_of

METADATA = ".metadata"

#: The metadata file of each rank, if the checkpoint was saved with ``use_collectives=False``.
_RANK_METADATA = re.compile(r"__(0|[1-9]\d{0,8})\.metadata")

#: The names of the files that a save of a distributed checkpoint writes, by us or by torch. Names of a save into an
#: object store have a digest in them, also in a copy on a disk: for example ``__0_0.distcp`` and
#: ``__0_0-0123456789abcdef.distcp``.
_OWNED = re.compile(
    rf"__\d+_\d+(-[0-9a-f]{{16}})?\.distcp|__\d+\.metadata|{re.escape(METADATA)}|{re.escape(checksums_json.NAME)}"
    r"|checksums-[0-9a-f]{16}\.json"
)


def is_dcp(path: Path) -> bool:
    """Return whether a folder has the metadata of a distributed checkpoint.

    The detection of formats asks it on each rank.
    """
    return store_of(path).file_exists(path / METADATA) or store_of(path).file_exists(path / "__0.metadata")


def find_owned_files(path: Path) -> frozenset[str] | None:
    """Return the names of the files of a distributed checkpoint, or of an interrupted save; ``None`` if it is none.

    See :mod:`rankless.run.ownership`. A save on fewer ranks than the one before leaves files that its metadata lack.
    """
    if not store_of(path).is_directory(path):
        return None
    names = store_of(path).list_names(path)
    for name in names & {METADATA}:
        metadata.decode_metadata(store_of(path).read_small(path / name), str(path / name), ReadBudget())
    return frozenset(name for name in names if _OWNED.fullmatch(name))


@dataclass(frozen=True)
class SavedTree:
    """The tree that a folder holds.

    ``entries`` are the tensors and values of the tree by the flat names of the metadata, and ``original_shapes`` the
    shapes of tensors that Megatron stored in another one. ``budget`` is the one that reading them was charged to.
    ``files`` are the metadata and all files with records; ``fingerprint`` is a digest of the metadata and the sizes of
    these files.
    """

    root: dict[str, Any]
    entries: Mapping[str, Any]
    budget: ReadBudget
    files: Sequence[Path]
    fingerprint: str
    original_shapes: Mapping[str, tuple[int, ...]]


def read_tree(path: Path, names: Mapping[str, object] = NAMES) -> SavedTree:
    """Return the tree that a folder holds. No tensor is read; a chunk is located in its file when it is first read.

    ``names`` are the globals that the pickles of its values may name.

    Raises ``CorruptCheckpointError``, naming the tensor, if a chunk is missing, overlaps another or ends outside of its
    file.
    """
    return DcpDirectory(path, ReaderPool(), names).read_tree()


class DcpDirectory:
    """A folder with metadata. ``readers`` reads the records that the metadata names.

    ``names`` are the globals that the pickles of its values may name.
    """

    def __init__(self, path: Path, readers: FileRangeReader, names: Mapping[str, object] = NAMES) -> None:
        self.path, self._readers, self._names = path, readers, names
        self._sizes: dict[str, int] = {}
        self._budget, self._tiling_budget = ReadBudget(), ReadBudget(least=LEAST)

    def read_tree(self) -> SavedTree:
        """See :func:`read_tree`."""
        dcp_metadata, raw = self.read_metadata()
        stored = checksums_json.read_checksums(self.path, raw)
        entries: dict[str, Any] = {
            name: self.build_tensor(name, tensor) for name, tensor in dcp_metadata.tensors.items()
        }
        entries |= dcp_metadata.unreadable
        self.check_overlaps(dcp_metadata)
        trees: dict[RecordLocation, Any] = {}
        for name, location in dcp_metadata.values.items():
            if location not in trees:
                window = self.record_window(name, location)
                if stored is not None:
                    checksums_json.check_checksums(window, self._readers, self.path, stored.files)
                trees[location] = self._read_value(window)
            entries[name] = trees[location]
        try:
            root = unflatten((dcp_metadata.paths.get(name, (name,)), value) for name, value in entries.items())
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{self.path}: {error}") from error
        sizes = sorted(self._sizes.items())
        files = [*self._metadata_files(), *(self.path / name for name, _ in sizes)]
        checksums_file = checksums_json.find_checksums(self.path, raw)
        files += [] if checksums_file is None else [checksums_file]
        fingerprint = f"{crc64(repr(sizes).encode(), crc64(raw)):016x}"
        return SavedTree(root, entries, self._budget, files, fingerprint, dcp_metadata.original_shapes)

    def _read_value(self, window: FileWindow) -> Any:
        """Return the value in a record, or a placeholder if it is unsafe to read, so that the others can be read."""
        try:
            return archive.read_archive(window, self._budget, self._names).root
        except UnsafePickleError as error:
            return UnreadTensor(f"is not read: {error}", type(error))

    def check_overlaps(self, dcp_metadata: DcpMetadata) -> None:
        """Raise ``CorruptCheckpointError`` if the records have more bytes than their files, and so must overlap.

        Reading all of them would read the same bytes again and again.
        """
        names = {location: name for name, location in dcp_metadata.values.items()}
        names |= {
            location: name for name, tensor in dcp_metadata.tensors.items() for location in tensor.chunks.values()
        }
        for location, name in names.items():
            self.record_window(name, location)
        nbytes = sum(location.size for location in names)
        size = sum(self._sizes.values())
        if nbytes > size:
            raise CorruptCheckpointError(
                f"{self.path}: the records in its metadata have {nbytes} bytes, but its files only {size}: they overlap"
            )

    def _metadata_files(self) -> list[Path]:
        if store_of(self.path).file_exists(self.path / METADATA):
            return [self.path / METADATA]
        by_rank = {
            int(match[1]): file
            for file in store_of(self.path).list_files(self.path)
            if (match := _RANK_METADATA.fullmatch(file.name))
        }
        return [by_rank[rank] for rank in sorted(by_rank)]

    def read_metadata(self) -> tuple[DcpMetadata, bytes]:
        """Return the metadata, merged over all ranks, and its raw bytes."""
        merged, all_bytes = DcpMetadata(), b""
        for file in self._metadata_files():
            store_of(file).check_regular(file, within=(self.path,))
            raw = store_of(file).read_small(file)
            merged.merge_rank(metadata.decode_metadata(raw, str(file), self._budget), str(file))
            self._tiling_budget.earn(len(raw))
            all_bytes += raw
        return merged, all_bytes

    def build_tensor(self, name: str, tensor: metadata.TensorMetadata) -> ChunkedTensor:
        """Return a tensor. Raises ``CorruptCheckpointError`` if its chunks do not tile it."""
        try:
            check_tiling(list(tensor.chunks), tensor.info.shape, self._tiling_budget)
        except ValueError as error:
            raise CorruptCheckpointError(f"{self.path}: tensor {name!r} is incomplete: {error}") from error
        chunks = (self._build_chunk(name, tensor.info.dtype, box, where) for box, where in tensor.chunks.items())
        return ChunkedTensor(tensor.info, tuple(chunks))

    def _build_chunk(self, name: str, dtype: str, box: IndexBox, location: RecordLocation) -> SourceChunk:
        window, info = self.record_window(name, location), TensorInfo(dtype, box.shape)
        if info.nbytes > location.size:
            raise CorruptCheckpointError(
                f"{self.path}: a chunk of tensor {name!r} has {info.nbytes} bytes, but its record in {location.file} "
                f"only {location.size}: the metadata is corrupt"
            )
        return SourceChunk(box, partial(locate_chunk, name, info, window), (window.path, window.start))

    def record_window(self, name: str, location: RecordLocation) -> FileWindow:
        """Return the part of a file that is the record of a chunk or a value.

        Raises ``CorruptCheckpointError`` if the file is missing or too short.
        """
        file, offset, size = location
        if file not in self._sizes:
            self._sizes[file] = self._file_size(file)
        if offset + size > self._sizes[file]:
            raise CorruptCheckpointError(
                f"{self.path / file} has {self._sizes[file]} bytes, but the metadata says that {name!r} is stored in "
                f"its bytes {offset} to {offset + size}: the file was truncated, or is from another save"
            )
        return FileWindow(self.path / file, offset, size, self._readers, DCP_LOAD)

    def _file_size(self, name: str) -> int:
        file = self.path / check_relative_path(name, str(self.path / METADATA))
        if not store_of(file).path_exists(file):
            raise CorruptCheckpointError(f"{file} is missing; the metadata names it")
        store_of(file).check_regular(file, within=(self.path,))
        return store_of(file).file_size(file)


def locate_chunk(name: str, info: TensorInfo, window: FileWindow) -> tensor_sources.StridedLocation:
    """Return the location of a chunk's elements. Its record is a file of ``torch.save`` inside a larger file."""
    chunk = archive.read_archive(window, ReadBudget()).root
    if not isinstance(chunk, TorchTensor) or chunk.info != info:
        actual = f"{chunk.info.dtype} {list(chunk.info.shape)}" if isinstance(chunk, TorchTensor) else "no tensor"
        raise CorruptCheckpointError(
            f"{window.label} must hold a chunk of tensor {name!r}, {info.dtype} {list(info.shape)}, but holds "
            f"{actual}: it is from another save, or corrupt"
        )
    return chunk.find_location()
