"""The files of a component: laid out by rank 0, filled by all ranks, finished by rank 0.

The layout of a :class:`~rankless.components.component_request.ComponentRequest` makes a :class:`FileSet` in the vote
"preparing the save"; headers are built in the decision of the vote "writing". Other libraries define the formats:
readers of safetensors and of ``torch.save`` must open the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from rankless.components.stored_component import StoredComponent
from rankless.conversion.torch_target import PlannedTorchFile
from rankless.engine.io.checkpoint_files import require_block_crcs
from rankless.engine.io.upload_target import FileFrame
from rankless.ondisk.block_crcs import Fragment
from rankless.ondisk.data_files import DataFile

#: Returns the fragments that all ranks hashed of a stored tensor.
FragmentsOf = Callable[[str], Sequence[Fragment]]


class LaidOutFile(NamedTuple):
    """The layout of a file: its bytes that belong to no tensor, and the byte offset of each of its tensors."""

    frame: FileFrame
    starts: Mapping[str, int]


class ComponentFile(Protocol):
    """A file of a component that is to be written."""

    @property
    def name(self) -> str:
        """The name of the file in its folder."""

    def lay_out(self) -> LaidOutFile:
        """Return the layout of the file."""

    def build_header(self, fragments_of: FragmentsOf) -> bytes:
        """Return the header of the file; empty if it has none. Raises ``RankMismatchError`` if a tensor has a gap."""


@dataclass(frozen=True)
class FileSet:
    """The files of a component for its ``content``, and small files next to them.

    ``stale_names`` are indexes and files in the same folder that readers would also take for this component: they and
    the files that they name are removed.
    """

    content: StoredComponent
    files: Sequence[ComponentFile]
    small_files: Mapping[str, bytes] = field(default_factory=dict)
    stale_names: Sequence[str] = ()

    @property
    def nbytes(self) -> int:
        """The size of its tensors and small files in bytes."""
        return self.content.nbytes + sum(map(len, self.small_files.values()))

    @property
    def names(self) -> list[str]:
        """The names of the files with tensors, in order."""
        return [file.name for file in self.files]

    def file_names(self) -> set[str]:
        """Return the names of all its files."""
        return {file.name for file in self.files} | self.small_files.keys()


class SafetensorsOutput:
    """A safetensors file with the CRCs of the blocks of its tensors."""

    def __init__(self, data: DataFile) -> None:
        self.name, self._data = Path(data.path).name, data

    def lay_out(self) -> LaidOutFile:
        """See :class:`ComponentFile`."""
        data = self._data
        starts = {name: data.data_start + entry.data_offsets[0] for name, entry in data.entries.items()}
        return LaidOutFile(FileFrame(data.size, data.data_start), starts)

    def build_header(self, fragments_of: FragmentsOf) -> bytes:
        """See :class:`ComponentFile`."""
        crcs: Iterable[int] = (
            crc
            for name, entry in self._data.entries.items()
            for crc in require_block_crcs(fragments_of(name), entry.nbytes, f"tensor {name!r}")
        )
        return self._data.build_header(crcs)


class AdapterOutput:
    """The file of an adapter in a folder of its own. The names of its tensors begin with the folder and a slash.

    For example, ``fr/base_model.model.q.lora_A.weight`` of the folder ``fr``.
    """

    def __init__(self, folder: str, data: DataFile) -> None:
        self._prefix, self._file = f"{folder}/", SafetensorsOutput(data)
        self.name = f"{folder}/{self._file.name}" if folder else self._file.name

    def lay_out(self) -> LaidOutFile:
        """See :class:`ComponentFile`."""
        frame, starts = self._file.lay_out()
        return LaidOutFile(frame, {self._prefix + name: start for name, start in starts.items()})

    def build_header(self, fragments_of: FragmentsOf) -> bytes:
        """See :class:`ComponentFile`."""
        return self._file.build_header(lambda name: fragments_of(self._prefix + name))


class TorchOutput:
    """A ``torch.save`` file. ``fakes`` are the tensors without data in its tree, by name."""

    def __init__(self, name: str, tree: object, fakes: Mapping[str, torch.Tensor]) -> None:
        self.name, self._file, self._fakes = name, PlannedTorchFile(tree), fakes

    def lay_out(self) -> LaidOutFile:
        """See :class:`ComponentFile`."""
        size, offsets, known = self._file.lay_out()
        # A tensor without elements has no bytes in the file.
        return LaidOutFile(
            FileFrame(size, known=known), {name: offsets.get(id(fake), 0) for name, fake in self._fakes.items()}
        )

    def build_header(self, fragments_of: FragmentsOf) -> bytes:
        """See :class:`ComponentFile`. This format has no header, and no room for CRCs."""
        for name, fake in self._fakes.items():
            require_block_crcs(fragments_of(name), fake.nbytes, f"tensor {name!r}")
        return b""
