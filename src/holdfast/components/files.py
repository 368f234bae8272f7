"""The files of a component: created at their final size by rank 0, filled by all ranks, finished by rank 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from holdfast.components.content import ComponentContent
from holdfast.conversion.torch_target import PlannedTorchFile
from holdfast.engine.io.checkpoint_files import require_block_crcs
from holdfast.ondisk.block_crcs import Fragment
from holdfast.ondisk.files import DataFile
from holdfast.storage.direct_io import BufferedWriter
from holdfast.storage.posix import allocate_space, make_directory

#: Returns the fragments that all ranks hashed of a stored tensor.
FragmentsOf = Callable[[str], Sequence[Fragment]]


class ComponentFile(Protocol):
    """A file of a component that is to be written."""

    @property
    def name(self) -> str:
        """The name of the file in its folder."""

    def create_file(self, path: Path) -> Mapping[str, int]:
        """Create the file at its final size. Returns the byte offset of each of its tensors."""

    def finish_file(self, path: Path, fragments_of: FragmentsOf) -> None:
        """Write all but the bytes of tensors, and sync the file. Raises ``RankMismatchError`` if a tensor has a gap."""


@dataclass(frozen=True)
class FileSet:
    """The files of a component for its ``content``, and small files next to them.

    ``stale_names`` are indexes and files in the same folder that readers would also take for this component: they and
    the files that they name are removed.
    """

    content: ComponentContent
    files: Sequence[ComponentFile]
    small_files: Mapping[str, bytes] = field(default_factory=dict)
    stale_names: Sequence[str] = ()

    @property
    def nbytes(self) -> int:
        """The size of its tensors and small files in bytes."""
        return self.content.nbytes + sum(map(len, self.small_files.values()))

    def file_names(self) -> set[str]:
        """Return the names of all its files."""
        return {file.name for file in self.files} | self.small_files.keys()


class SafetensorsOutput:
    """A safetensors file with the CRCs of the blocks of its tensors."""

    def __init__(self, data: DataFile) -> None:
        self.name, self._data = Path(data.path).name, data

    def create_file(self, path: Path) -> Mapping[str, int]:
        """See :class:`ComponentFile`."""
        allocate_space(path, self._data.size)
        return {name: self._data.data_start + entry.data_offsets[0] for name, entry in self._data.entries.items()}

    def finish_file(self, path: Path, fragments_of: FragmentsOf) -> None:
        """See :class:`ComponentFile`."""
        crcs: Iterable[int] = (
            crc
            for name, entry in self._data.entries.items()
            for crc in require_block_crcs(fragments_of(name), entry.nbytes, f"tensor {name!r}")
        )
        with BufferedWriter(path) as writer:
            writer.write(0, memoryview(self._data.build_header(crcs)))
            writer.sync()


class AdapterOutput:
    """The file of an adapter in a folder of its own. The names of its tensors begin with the folder and a slash."""

    def __init__(self, folder: str, data: DataFile) -> None:
        self._prefix, self._file = f"{folder}/", SafetensorsOutput(data)
        self.name = f"{folder}/{self._file.name}" if folder else self._file.name

    def create_file(self, path: Path) -> Mapping[str, int]:
        """See :class:`ComponentFile`."""
        make_directory(path.parent)
        return {self._prefix + name: start for name, start in self._file.create_file(path).items()}

    def finish_file(self, path: Path, fragments_of: FragmentsOf) -> None:
        """See :class:`ComponentFile`."""
        self._file.finish_file(path, lambda name: fragments_of(self._prefix + name))


class TorchOutput:
    """A ``torch.save`` file. ``fakes`` are the tensors without data in its tree, by name."""

    def __init__(self, name: str, tree: object, fakes: Mapping[str, torch.Tensor]) -> None:
        self.name, self._file, self._fakes = name, PlannedTorchFile(tree), fakes

    def create_file(self, path: Path) -> Mapping[str, int]:
        """See :class:`ComponentFile`."""
        self._file.create_file(path)
        offsets = self._file.read_offsets(path)
        # A tensor without elements has no bytes in the file.
        return {name: offsets.get(id(fake), 0) for name, fake in self._fakes.items()}

    def finish_file(self, path: Path, fragments_of: FragmentsOf) -> None:
        """See :class:`ComponentFile`. This format has no room for CRCs."""
        for name, fake in self._fakes.items():
            require_block_crcs(fragments_of(name), fake.nbytes, f"tensor {name!r}")
        self._file.write_small_tensors(path)
