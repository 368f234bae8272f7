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
from holdfast.errors import DamagedError
from holdfast.formats.dcp import metadata
from holdfast.formats.dcp.chunked import Chunked
from holdfast.formats.dcp.metadata import Metadata, Place
from holdfast.formats.dcp.tiling import check_tiling
from holdfast.formats.dcp.tree import nested
from holdfast.formats.torchfile import archive
from holdfast.formats.torchfile.objects import Tensor
from holdfast.formats.torchfile.zips import Reads, Window
from holdfast.layout.blocks import crc64
from holdfast.layout.files import TensorInfo
from holdfast.layout.names import check_inside
from holdfast.storage import local
from holdfast.storage.readers import Readers

METADATA = ".metadata"

#: What each rank writes for itself with ``use_collectives=False``.
_OWN = re.compile(r"__(\d{1,9})\.metadata")


def is_dcp(path: Path) -> bool:
    """Whether a folder has such metadata."""
    return local.is_file(path / METADATA) or local.is_file(path / "__0.metadata")


@dataclass(frozen=True)
class Saved:
    """What was in a folder: the tree, the bytes that it was pickled as, the files, and a digest of what is known.

    ``entries`` are what is in the tree, by the flat names of the metadata.
    """

    root: dict[str, Any]
    entries: Mapping[str, Any]
    nbytes: int
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

    def read(self) -> Saved:
        """See :func:`read`."""
        found, raw = self.read_metadata()
        entries: dict[str, Any] = {name: self.tensor(name, tensor) for name, tensor in found.tensors.items()}
        nbytes = len(raw)
        for name, place in found.values.items():
            tree = archive.read(self.window(name, place))
            entries[name] = tree.root
            nbytes += tree.nbytes
        try:
            root = nested((found.paths.get(name, (name,)), value) for name, value in entries.items())
        except DamagedError as error:
            raise DamagedError(f"{self.path}: {error}") from error
        sizes = sorted(self._sizes.items())
        files = [*self._metadata_files(), *(self.path / name for name, _ in sizes)]
        return Saved(root, entries, nbytes, files, f"{crc64(repr(sizes).encode(), crc64(raw)):016x}")

    def _metadata_files(self) -> list[Path]:
        if local.is_file(self.path / METADATA):
            return [self.path / METADATA]
        own = {int(match[1]): file for file in local.files(self.path) if (match := _OWN.fullmatch(file.name))}
        return [own[rank] for rank in sorted(own)]

    def read_metadata(self) -> tuple[Metadata, bytes]:
        """What the metadata says, and its bytes."""
        whole, everything = Metadata(), b""
        for file in self._metadata_files():
            local.check_regular(file, within=(self.path,))
            raw = local.read_small(file)
            whole.merge(metadata.decode(raw, str(file)), str(file))
            everything += raw
        return whole, everything

    def tensor(self, name: str, tensor: metadata.Tensor) -> Chunked:
        """A tensor, whose chunks are all of it."""
        try:
            check_tiling(list(tensor.chunks), tensor.info.shape)
        except ValueError as error:
            raise DamagedError(f"{self.path}: tensor {name!r} is not whole: {error}") from error
        parts = (self._part(name, tensor.info.dtype, box, place) for box, place in tensor.chunks.items())
        return Chunked(tensor.info, tuple(parts))

    def _part(self, name: str, dtype: str, box: Box, place: Place) -> Part:
        window = self.window(name, place)
        return Part(box, partial(chunk_of, name, TensorInfo(dtype, box.shape), window), (window.path, window.start))

    def window(self, name: str, place: Place) -> Window:
        """The record of a chunk or a value."""
        if place.file not in self._sizes:
            self._sizes[place.file] = self._size(place.file)
        if place.offset + place.size > self._sizes[place.file]:
            raise DamagedError(
                f"{self.path / place.file} has {self._sizes[place.file]} bytes, and {name!r} should lie at bytes "
                f"{place.offset} to {place.offset + place.size} of it: it was cut short, or is of another save"
            )
        return Window(self.path / place.file, place.offset, place.size, self._readers)

    def _size(self, name: str) -> int:
        file = self.path / check_inside(name, str(self.path / METADATA))
        if not file.exists():
            raise DamagedError(f"{file} is missing; the metadata names it")
        local.check_regular(file, within=(self.path,))
        return local.size_of(file)


def chunk_of(name: str, info: TensorInfo, window: Window) -> woven.Place:
    """Where the elements of a chunk lie: it is a whole file of ``torch.save`` in a file of such."""
    found = archive.read(window).root
    if not isinstance(found, Tensor) or found.info != info:
        there = f"{found.info.dtype} {list(found.info.shape)}" if isinstance(found, Tensor) else "no tensor"
        raise DamagedError(
            f"{window.label} should hold a chunk of {name!r}, {info.dtype} {list(info.shape)}, and holds {there}: it "
            "is of another save, or damaged"
        )
    return found.place()
