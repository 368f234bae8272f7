"""A folder of ``torch.distributed.checkpoint``: its metadata, and the tree that was saved, with tensors in chunks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.engine.io import sources
from holdfast.engine.io.sources import SourceChunk
from holdfast.engine.plan.ranges import IndexBox
from holdfast.errors import CorruptCheckpointError, UnsafePickleError
from holdfast.formats.dcp import checksums, metadata
from holdfast.formats.dcp.chunked_tensor import ChunkedTensor
from holdfast.formats.dcp.metadata import DCP_LOAD, DcpMetadata, RecordLocation
from holdfast.formats.dcp.tiling import LEAST, check_tiling
from holdfast.formats.dcp.unflatten import unflatten
from holdfast.formats.stored_tensor import UnreadTensor
from holdfast.formats.torchfile import archive
from holdfast.formats.torchfile.objects import TorchTensor
from holdfast.formats.torchfile.zip_reader import FileWindow, RangeReader
from holdfast.ondisk.blocks import crc64
from holdfast.ondisk.files import TensorInfo
from holdfast.ondisk.read_budget import ReadBudget
from holdfast.ondisk.validation import check_relative_path
from holdfast.storage import posix
from holdfast.storage.reader_pool import ReaderPool

METADATA = ".metadata"

#: What each rank writes for itself with ``use_collectives=False``.
_OWN = re.compile(r"__(0|[1-9]\d{0,8})\.metadata")


def is_dcp(path: Path) -> bool:
    """Whether a folder has such metadata."""
    return posix.is_taken(path / METADATA) or posix.is_taken(path / "__0.metadata")


@dataclass(frozen=True)
class SavedTree:
    """What was in a folder: the tree, the bytes that it was pickled as, the files, and a digest of what is known.

    ``entries`` are what is in the tree, by the flat names of the metadata; ``budget`` has read it.
    """

    root: dict[str, Any]
    entries: Mapping[str, Any]
    budget: ReadBudget
    files: Sequence[Path]
    fingerprint: str


def read_tree(path: Path) -> SavedTree:
    """The tree that a folder holds. No tensor is read, and chunks are only looked for when one is.

    Raises ``CorruptCheckpointError`` where a chunk is missing, overlaps another or lies outside of its file, naming the tensor.
    """
    return DcpDirectory(path, ReaderPool()).read()


class DcpDirectory:
    """A folder with metadata. ``readers`` reads the records that this names."""

    def __init__(self, path: Path, readers: RangeReader) -> None:
        self.path, self._readers = path, readers
        self._sizes: dict[str, int] = {}
        self._budget, self._tiling = ReadBudget(), ReadBudget(least=LEAST)

    def read(self) -> SavedTree:
        """See :func:`read_tree`."""
        found, raw = self.read_metadata()
        known = checksums.read_checksums(self.path, raw)
        entries: dict[str, Any] = {name: self.tensor(name, tensor) for name, tensor in found.tensors.items()}
        entries |= found.unreadable
        self.check_overlaps(found)
        trees: dict[RecordLocation, Any] = {}
        for name, place in found.values.items():
            if place not in trees:
                window = self.window(name, place)
                if known is not None:
                    checksums.check_checksums(window, self._readers, self.path, known.files)
                trees[place] = self._value(window)
            entries[name] = trees[place]
        try:
            root = unflatten((found.paths.get(name, (name,)), value) for name, value in entries.items())
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{self.path}: {error}") from error
        sizes = sorted(self._sizes.items())
        files = [*self._metadata_files(), *(self.path / name for name, _ in sizes)]
        files += [] if known is None else [self.path / checksums.NAME]
        return SavedTree(root, entries, self._budget, files, f"{crc64(repr(sizes).encode(), crc64(raw)):016x}")

    def _value(self, window: FileWindow) -> Any:
        """What is in a record; what holdfast does not read must not keep anybody from the rest."""
        try:
            return archive.read_archive(window, self._budget).root
        except UnsafePickleError as error:
            return UnreadTensor(f"is not read: {error}", type(error))

    def check_overlaps(self, found: DcpMetadata) -> None:
        """Raise ``CorruptCheckpointError`` where records overlap so much that they have more bytes than their files.

        Whoever reads all of them would read the same bytes again and again.
        """
        wanted = {place: name for name, place in found.values.items()}
        wanted |= {place: name for name, tensor in found.tensors.items() for place in tensor.chunks.values()}
        for place, name in wanted.items():
            self.window(name, place)
        nbytes = sum(place.size for place in wanted)
        if nbytes > sum(self._sizes.values()):
            raise CorruptCheckpointError(
                f"{self.path}: its records have {nbytes} bytes, more than its files: they overlap"
            )

    def _metadata_files(self) -> list[Path]:
        if posix.is_taken(self.path / METADATA):
            return [self.path / METADATA]
        own = {int(match[1]): file for file in posix.list_files(self.path) if (match := _OWN.fullmatch(file.name))}
        return [own[rank] for rank in sorted(own)]

    def read_metadata(self) -> tuple[DcpMetadata, bytes]:
        """What the metadata says, and its bytes."""
        whole, everything = DcpMetadata(), b""
        for file in self._metadata_files():
            posix.check_regular(file, within=(self.path,))
            raw = posix.read_small(file)
            whole.merge(metadata.decode_metadata(raw, str(file), self._budget), str(file))
            self._tiling.earn(len(raw))
            everything += raw
        return whole, everything

    def tensor(self, name: str, tensor: metadata.TensorMetadata) -> ChunkedTensor:
        """A tensor, whose chunks are all of it."""
        try:
            check_tiling(list(tensor.chunks), tensor.info.shape, self._tiling)
        except ValueError as error:
            raise CorruptCheckpointError(f"{self.path}: tensor {name!r} is not whole: {error}") from error
        parts = (self._part(name, tensor.info.dtype, box, place) for box, place in tensor.chunks.items())
        return ChunkedTensor(tensor.info, tuple(parts))

    def _part(self, name: str, dtype: str, box: IndexBox, place: RecordLocation) -> SourceChunk:
        window, info = self.window(name, place), TensorInfo(dtype, box.shape)
        if info.nbytes > place.size:
            raise CorruptCheckpointError(
                f"{self.path}: a chunk of {name!r} has {info.nbytes} bytes, and its record {place.size}: it is damaged"
            )
        return SourceChunk(box, partial(chunk_at, name, info, window), (window.path, window.start))

    def window(self, name: str, place: RecordLocation) -> FileWindow:
        """The record of a chunk or a value."""
        if place.file not in self._sizes:
            self._sizes[place.file] = self._size(place.file)
        if place.offset + place.size > self._sizes[place.file]:
            raise CorruptCheckpointError(
                f"{self.path / place.file} has {self._sizes[place.file]} bytes, and {name!r} should lie at bytes "
                f"{place.offset} to {place.offset + place.size} of it: it was cut short, or is of another save"
            )
        return FileWindow(self.path / place.file, place.offset, place.size, self._readers, DCP_LOAD)

    def _size(self, name: str) -> int:
        file = self.path / check_relative_path(name, str(self.path / METADATA))
        if not posix.path_exists(file):
            raise CorruptCheckpointError(f"{file} is missing; the metadata names it")
        posix.check_regular(file, within=(self.path,))
        return posix.size_of(file)


def chunk_at(name: str, info: TensorInfo, window: FileWindow) -> sources.StridedLocation:
    """Where the elements of a chunk lie: it is a whole file of ``torch.save`` in a file of such."""
    found = archive.read_archive(window, ReadBudget()).root
    if not isinstance(found, TorchTensor) or found.info != info:
        there = f"{found.info.dtype} {list(found.info.shape)}" if isinstance(found, TorchTensor) else "no tensor"
        raise CorruptCheckpointError(
            f"{window.label} should hold a chunk of {name!r}, {info.dtype} {list(info.shape)}, and holds {there}: it "
            "is of another save, or damaged"
        )
    return found.place()
