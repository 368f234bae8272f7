"""Files to be: made at their final size by rank 0, filled by all ranks, finished by rank 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from holdfast.components.content import ComponentContent
from holdfast.conversion.torch_target import PlannedTorchFile
from holdfast.engine.io.commit import block_crcs
from holdfast.ondisk.blocks import Fragment
from holdfast.ondisk.files import DataFile
from holdfast.storage.direct_io import BufferedWriter
from holdfast.storage.posix import allocate_space

#: What all ranks hashed of a stored tensor.
Found = Callable[[str], Sequence[Fragment]]


class ComponentFile(Protocol):
    """One file of a part."""

    @property
    def name(self) -> str:
        """Its name in its folder."""

    def make(self, path: Path) -> Mapping[str, int]:
        """Make it at its final size. Returns where each of its tensors starts, in bytes."""

    def finish(self, path: Path, found: Found) -> None:
        """Write all but the bytes of tensors, and make it durable. Raises ``RankMismatchError`` for a gap in one."""


@dataclass(frozen=True)
class FileSet:
    """The files of a part, and small ones beside them, for what is in ``content``.

    ``rivals`` are names in the same folder that would be taken for this part, too: what they name goes.
    """

    content: ComponentContent
    files: Sequence[ComponentFile]
    small: Mapping[str, bytes] = field(default_factory=dict)
    rivals: Sequence[str] = ()

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors and small files."""
        return self.content.nbytes + sum(map(len, self.small.values()))

    def names(self) -> set[str]:
        """All its files."""
        return {file.name for file in self.files} | self.small.keys()


class SafetensorsOutput:
    """A safetensors file with the CRCs of its tensors' blocks."""

    def __init__(self, data: DataFile) -> None:
        self.name, self._data = Path(data.path).name, data

    def make(self, path: Path) -> Mapping[str, int]:
        """See :class:`ComponentFile`."""
        allocate_space(path, self._data.size)
        return {name: self._data.data_start + entry.data_offsets[0] for name, entry in self._data.entries.items()}

    def finish(self, path: Path, found: Found) -> None:
        """See :class:`ComponentFile`."""
        crcs: Iterable[int] = (
            crc
            for name, entry in self._data.entries.items()
            for crc in block_crcs(found(name), entry.nbytes, f"tensor {name!r}")
        )
        with BufferedWriter(path) as writer:
            writer.write(0, memoryview(self._data.header(crcs)))
            writer.sync()


class TorchOutput:
    """A file of ``torch.save``. ``fakes`` are the tensors without data in its tree, by name."""

    def __init__(self, name: str, tree: object, fakes: Mapping[str, torch.Tensor]) -> None:
        self.name, self._file, self._fakes = name, PlannedTorchFile(tree), fakes

    def make(self, path: Path) -> Mapping[str, int]:
        """See :class:`ComponentFile`."""
        self._file.make(path)
        starts = self._file.starts(path)
        # A tensor of no elements lies nowhere.
        return {name: starts.get(id(fake), 0) for name, fake in self._fakes.items()}

    def finish(self, path: Path, found: Found) -> None:
        """See :class:`ComponentFile`. There is no room for CRCs."""
        for name, fake in self._fakes.items():
            block_crcs(found(name), fake.nbytes, f"tensor {name!r}")
        self._file.finish(path)
