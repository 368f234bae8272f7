"""Folders of weights as Hugging Face libraries write them: one safetensors file, or several and an index.

Source: ``save_pretrained`` of transformers. A single safetensors file is read as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.errors import CorruptCheckpointError, FormatError
from holdfast.formats.contained_paths import check_contained
from holdfast.formats.native import check_native_form
from holdfast.formats.reader import CheckpointValues, FileExtent, UnreadTensorNote
from holdfast.formats.safetensors import SafetensorsFile, SafetensorsFiles, is_safetensors
from holdfast.formats.sharded.index import read_index
from holdfast.ondisk import blocks, values
from holdfast.ondisk.files import TensorInfo
from holdfast.ondisk.header import parse_json_object
from holdfast.ondisk.values import ArrayCodec
from holdfast.storage import posix

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

#: The same of an optimizer by itself, as ``save_optimizer`` writes it.
_OPTIMIZER = ("optimizer.safetensors.index.json", "optimizer.safetensors")

#: Key of the header metadata of a first file that holds values beside the tensors, as JSON by part.
VALUES_KEY = "holdfast.values"

MODEL, OPTIMIZER = "model", "optimizer"


def is_huggingface(path: Path) -> bool:
    """Whether a folder holds weights in this layout, or a file is a safetensors file."""
    if posix.is_file(path):
        return path.suffix == ".safetensors" or is_safetensors(path)
    return bool(kinds_in(path))


def kinds_in(folder: Path) -> list[str]:
    """What a folder holds in this layout: a model, an optimizer as we write it."""
    index, single = _OPTIMIZER
    ours = posix.is_taken(folder / single) or (
        posix.is_taken(folder / index) and not read_index(folder / index, folder).groups_file
    )
    model = posix.is_taken(folder / INDEX) or posix.is_taken(folder / SINGLE)
    return [kind for kind, there in ((MODEL, model), (OPTIMIZER, ours)) if there]


class HuggingFaceReader:
    """A folder of weights, or one safetensors file: a model, or an optimizer by itself as we write it, or both."""

    format = "huggingface"
    unread: Sequence[UnreadTensorNote] = ()

    def __init__(self, path: Path) -> None:
        self.path = path
        self._sets = dict(self._open())
        self.files: Sequence[Path] = [file.path for group in self._sets.values() for file in group.files]
        self.groups: Mapping[str, Mapping[str, TensorInfo]] = {name: one.tensors for name, one in self._sets.items()}
        self.tied: Mapping[str, Mapping[str, str]] = {name: one.tied for name, one in self._sets.items()}

    def _open(self) -> Iterator[tuple[str, SafetensorsFiles]]:
        if posix.is_file(self.path):
            file = SafetensorsFile.open(self.path)
            yield (OPTIMIZER if OPTIMIZER in self._told([file]) else MODEL), SafetensorsFiles([file])
            return
        for group, (index, single) in ((MODEL, (INDEX, SINGLE)), (OPTIMIZER, _OPTIMIZER)):
            files = self._files(index, single)
            if files:
                yield group, SafetensorsFiles([SafetensorsFile.open(file) for file in files])

    def _files(self, index: str, single: str) -> list[Path]:
        if posix.is_taken(self.path / index) and not read_index(self.path / index, self.path).groups_file:
            return [self._checked(self.path / name, index) for name in sorted(set(self._weight_map(index).values()))]
        return [self._checked(self.path / single, index)] if posix.is_taken(self.path / single) else []

    def _weight_map(self, name: str) -> dict[str, str]:
        return read_index(self.path / name, self.path).weight_map

    def _checked(self, file: Path, index: str) -> Path:
        if not posix.path_exists(file):
            raise CorruptCheckpointError(f"{file} is missing; {index} names it")
        check_contained(file, self.path)
        return file

    @property
    def fingerprint(self) -> str:
        """A digest of names, dtypes, shapes and places."""
        text = repr(
            [
                sorted((name, info, group.home(name).extent(name, 0, 0).offset) for name, info in group.tensors.items())
                for group in self._sets.values()
            ]
        )
        told = repr([self._texts(group.files) for group in self._sets.values()])
        return f"{blocks.crc64((text + told).encode()):016x}"

    def extents(self, group: str, name: str, start: int, stop: int) -> Sequence[FileExtent]:
        """See :class:`holdfast.formats.reader.Reader`."""
        if group not in self._sets:
            raise FormatError(f"{self.path} holds {' and '.join(self._sets)}, and no {group}")
        return [self._sets[group].home(name).extent(name, start, stop)]

    def crcs(self, group: str, name: str) -> Sequence[int] | None:
        """The CRCs in files of ours; others have none."""
        return self._sets[group].home(name).crcs.get(name)

    def values(self, rank: int, shared: ArrayCodec, own: ArrayCodec) -> CheckpointValues:
        """What the headers of files of ours tell beside the tensors; others have none."""
        del rank, own
        found = {}
        for name, group in self._sets.items():
            told = self._told(group.files)
            if name == OPTIMIZER and name not in told:
                raise CorruptCheckpointError(f"{self.path}: no file of the optimizer tells its groups")
            if name in told:
                found[name] = check_native_form(
                    name, values.decode_value(told[name], shared, str(self.path)), self.path
                )
        return CheckpointValues(found)

    def _told(self, files: Sequence[SafetensorsFile]) -> dict[str, Any]:
        """The values in headers, encoded, by part."""
        found: dict[str, Any] = {}
        for text in self._texts(files):
            found |= parse_json_object(text, f"{VALUES_KEY} of {self.path}")
        return found

    def _texts(self, files: Sequence[SafetensorsFile]) -> list[str]:
        every = [file.header.metadata.get(VALUES_KEY) for file in files]
        return [text for text in every if text is not None]

    def is_current(self) -> bool:
        """Nobody can tell: a folder of weights has no name of its own."""
        return True

    def check_files(self) -> None:
        """There is nothing to check them against, but that an index names just the tensors that are there."""
        for name, (index, _) in ((MODEL, (INDEX, SINGLE)), (OPTIMIZER, _OPTIMIZER)):
            if name in self._sets and posix.is_taken(self.path / index):
                self._check_index(index, self._sets[name])

    def _check_index(self, index: str, group: SafetensorsFiles) -> None:
        for name, file in self._weight_map(index).items():
            if name not in group.tensors or group.home(name).path.name != file:
                raise CorruptCheckpointError(
                    f"{self.path / index} says that tensor {name!r} is in {file}, where it is not"
                )
