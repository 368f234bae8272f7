"""Folders of weights as Hugging Face libraries write them: one safetensors file, or several and an index.

Source: ``save_pretrained`` of transformers. A single safetensors file is read as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from holdfast.errors import DamagedError, FormatError
from holdfast.formats.reader import Extent, Values
from holdfast.formats.safetensors import FileGroup, SafetensorsFile
from holdfast.layout import blocks
from holdfast.layout.files import TensorInfo
from holdfast.layout.names import check_inside
from holdfast.layout.values import ArrayCodec
from holdfast.storage import local

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

MODEL = "model"


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def is_huggingface(path: Path) -> bool:
    """Whether a folder holds weights in this layout, or a file is a safetensors file."""
    if local.is_file(path):
        return path.suffix == ".safetensors"
    return local.is_file(path / INDEX) or local.is_file(path / SINGLE)


class HuggingFaceReader:
    """A folder of weights, or one safetensors file; a model without anything else."""

    format = "huggingface"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: Sequence[Path] = self._files()
        self._group = FileGroup([SafetensorsFile.open(file) for file in self.files])
        self.groups: Mapping[str, Mapping[str, TensorInfo]] = {MODEL: self._group.tensors}
        self.tied: Mapping[str, Mapping[str, str]] = {MODEL: self._group.tied}

    def _files(self) -> list[Path]:
        if local.is_file(self.path):
            return [self.path]
        if not local.is_file(self.path / INDEX):
            return [self._checked(self.path / SINGLE)]
        return [self._checked(self.path / name) for name in sorted(set(self._weight_map().values()))]

    def _weight_map(self) -> dict[str, str]:
        file = self._checked(self.path / INDEX)
        try:
            index = msgspec.json.decode(local.read_small(file), type=_Index)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise DamagedError(f"{file} is no index of weights: {error}") from error
        for name in index.weight_map.values():
            check_inside(name, str(file))
        return index.weight_map

    def _checked(self, file: Path) -> Path:
        if not local.exists(file):
            raise DamagedError(f"{file} is missing; {INDEX} names it")
        # In the hub's cache a file is a link from snapshots/<revision>/ to blobs/ of the same repository.
        cached = self.path.parent.name == "snapshots"
        local.check_regular(file, within=(self.path, self.path.parent.parent / "blobs") if cached else (self.path,))
        return file

    @property
    def fingerprint(self) -> str:
        """A digest of names, dtypes, shapes and places."""
        text = repr(
            sorted(
                (name, info, self._group.home(name).extent(name, 0, 0).offset)
                for name, info in self._group.tensors.items()
            )
        )
        return f"{blocks.crc64(text.encode()):016x}"

    def extents(self, group: str, name: str, start: int, stop: int) -> Sequence[Extent]:
        """See :class:`holdfast.formats.reader.Reader`."""
        if group != MODEL:
            raise FormatError(f"{self.path} holds a model and no {group}")
        return [self._group.home(name).extent(name, start, stop)]

    def crcs(self, group: str, name: str) -> Sequence[int] | None:
        """The CRCs where a folder of ours is read as it lies; others have none."""
        del group  # there is one
        return self._group.home(name).crcs.get(name)

    def values(self, rank: int, shared: ArrayCodec, own: ArrayCodec) -> Values:
        """A folder of weights has none."""
        del rank, shared, own
        return Values({})

    def is_current(self) -> bool:
        """Nobody can tell: a folder of weights has no name of its own."""
        return True

    def check_files(self) -> None:
        """There is nothing to check them against, but that the index names just the tensors that are there."""
        if local.is_file(self.path / INDEX):
            weight_map = self._weight_map()
            for name, file in weight_map.items():
                if name not in self._group.tensors or self._group.home(name).path.name != file:
                    raise DamagedError(f"{self.path / INDEX} says that tensor {name!r} is in {file}, where it is not")
