"""A folder of ``torch.distributed.checkpoint``: its metadata, and the tree that was saved, with tensors in chunks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.engine import woven
from holdfast.engine.runs import Box
from holdfast.engine.woven import Part
from holdfast.errors import DamagedError, UnsafePickleError
from holdfast.formats.arrange.stored import Unread
from holdfast.formats.dcp import checksums, metadata
from holdfast.formats.dcp.chunked import Chunked
from holdfast.formats.dcp.metadata import DCP_LOAD, Metadata, Place
from holdfast.formats.dcp.tiling import LEAST, check_tiling
from holdfast.formats.dcp.tree import nested
from holdfast.formats.torchfile import archive
from holdfast.formats.torchfile.objects import Tensor
from holdfast.formats.torchfile.zips import Reads, Window
from holdfast.layout.blocks import crc64
from holdfast.layout.budget import Budget
from holdfast.layout.files import TensorInfo
from holdfast.layout.names import check_inside
from holdfast.storage import local
from holdfast.storage.readers import Readers

METADATA = ".metadata"

#: What each rank writes for itself with ``use_collectives=False``.
_OWN = re.compile(r"__(0|[1-9]\d{0,8})\.metadata")


def is_dcp(path: Path) -> bool:
    """Whether a folder has such metadata."""
    return local.is_taken(path / METADATA) or local.is_taken(path / "__0.metadata")


@dataclass(frozen=True)
class Saved:
    """What was in a folder: the tree, the bytes that it was pickled as, the files, and a digest of what is known.

    ``entries`` are what is in the tree, by the flat names of the metadata; ``budget`` has read it.
    """

    root: dict[str, Any]
    entries: Mapping[str, Any]
    budget: Budget
    files: Sequence[Path]
    fingerprint: str


def read(path: Path) -> Saved:
    """The tree that a folder holds. No tensor is read, and chunks are only looked for when one is.

    Raises ``DamagedError`` where a chunk is missing, overlaps another or lies outside of its file, naming the tensor.
    """
    return Folder(path, Readers()).read()


class Folder:
    """A folder with metadata. ``readers`` reads the records that this names."""

    def __init__(self, path: Path, readers: Reads) -> None:
        self.path, self._readers = path, readers
        self._sizes: dict[str, int] = {}
        self._budget, self._tiling = Budget(), Budget(least=LEAST)

    def read(self) -> Saved:
        """See :func:`read`."""
        found, raw = self.read_metadata()
        known = checksums.read(self.path, raw)
        entries: dict[str, Any] = {name: self.tensor(name, tensor) for name, tensor in found.tensors.items()}
        entries |= found.unreadable
        self.check_overlaps(found)
        trees: dict[Place, Any] = {}
        for name, place in found.values.items():
            if place not in trees:
                window = self.window(name, place)
                if known is not None:
                    checksums.check(window, self._readers, self.path, known.files)
                trees[place] = self._value(window)
            entries[name] = trees[place]
        try:
            root = nested((found.paths.get(name, (name,)), value) for name, value in entries.items())
        except DamagedError as error:
            raise DamagedError(f"{self.path}: {error}") from error
        sizes = sorted(self._sizes.items())
        files = [*self._metadata_files(), *(self.path / name for name, _ in sizes)]
        files += [] if known is None else [self.path / checksums.NAME]
        return Saved(root, entries, self._budget, files, f"{crc64(repr(sizes).encode(), crc64(raw)):016x}")

    def _value(self, window: Window) -> Any:
        """What is in a record; what holdfast does not read must not keep anybody from the rest."""
        try:
            return archive.read(window, self._budget).root
        except UnsafePickleError as error:
            return Unread(f"is not read: {error}", type(error))

    def check_overlaps(self, found: Metadata) -> None:
        """Raise ``DamagedError`` where records overlap so much that they have more bytes than their files.

        Whoever reads all of them would read the same bytes again and again.
        """
        wanted = {place: name for name, place in found.values.items()}
        wanted |= {place: name for name, tensor in found.tensors.items() for place in tensor.chunks.values()}
        for place, name in wanted.items():
            self.window(name, place)
        nbytes = sum(place.size for place in wanted)
        if nbytes > sum(self._sizes.values()):
            raise DamagedError(f"{self.path}: its records have {nbytes} bytes, more than its files: they overlap")

    def _metadata_files(self) -> list[Path]:
        if local.is_taken(self.path / METADATA):
            return [self.path / METADATA]
        own = {int(match[1]): file for file in local.files(self.path) if (match := _OWN.fullmatch(file.name))}
        return [own[rank] for rank in sorted(own)]

    def read_metadata(self) -> tuple[Metadata, bytes]:
        """What the metadata says, and its bytes."""
        whole, everything = Metadata(), b""
        for file in self._metadata_files():
            local.check_regular(file, within=(self.path,))
            raw = local.read_small(file)
            whole.merge(metadata.decode(raw, str(file), self._budget), str(file))
            self._tiling.earn(len(raw))
            everything += raw
        return whole, everything

    def tensor(self, name: str, tensor: metadata.Tensor) -> Chunked:
        """A tensor, whose chunks are all of it."""
        try:
            check_tiling(list(tensor.chunks), tensor.info.shape, self._tiling)
        except ValueError as error:
            raise DamagedError(f"{self.path}: tensor {name!r} is not whole: {error}") from error
        parts = (self._part(name, tensor.info.dtype, box, place) for box, place in tensor.chunks.items())
        return Chunked(tensor.info, tuple(parts))

    def _part(self, name: str, dtype: str, box: Box, place: Place) -> Part:
        window, info = self.window(name, place), TensorInfo(dtype, box.shape)
        if info.nbytes > place.size:
            raise DamagedError(
                f"{self.path}: a chunk of {name!r} has {info.nbytes} bytes, and its record {place.size}: it is damaged"
            )
        return Part(box, partial(chunk_of, name, info, window), (window.path, window.start))

    def window(self, name: str, place: Place) -> Window:
        """The record of a chunk or a value."""
        if place.file not in self._sizes:
            self._sizes[place.file] = self._size(place.file)
        if place.offset + place.size > self._sizes[place.file]:
            raise DamagedError(
                f"{self.path / place.file} has {self._sizes[place.file]} bytes, and {name!r} should lie at bytes "
                f"{place.offset} to {place.offset + place.size} of it: it was cut short, or is of another save"
            )
        return Window(self.path / place.file, place.offset, place.size, self._readers, DCP_LOAD)

    def _size(self, name: str) -> int:
        file = self.path / check_inside(name, str(self.path / METADATA))
        if not local.exists(file):
            raise DamagedError(f"{file} is missing; the metadata names it")
        local.check_regular(file, within=(self.path,))
        return local.size_of(file)


def chunk_of(name: str, info: TensorInfo, window: Window) -> woven.Place:
    """Where the elements of a chunk lie: it is a whole file of ``torch.save`` in a file of such."""
    found = archive.read(window, Budget()).root
    if not isinstance(found, Tensor) or found.info != info:
        there = f"{found.info.dtype} {list(found.info.shape)}" if isinstance(found, Tensor) else "no tensor"
        raise DamagedError(
            f"{window.label} should hold a chunk of {name!r}, {info.dtype} {list(info.shape)}, and holds {there}: it "
            "is of another save, or damaged"
        )
    return found.place()
