"""Into one file of ``torch.save``.

torch itself writes it, with tensors that have no data; where these lie in the file is read back, and filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.serialization import skip_data

from holdfast.conversion.choice import Key
from holdfast.conversion.target import Material, Places
from holdfast.engine.local import LocalPart
from holdfast.engine.spec import PER_RANK as RANKS
from holdfast.engine.transfer import Fragments
from holdfast.formats.reader import Reader
from holdfast.formats.torchfile.objects import Tensor
from holdfast.formats.torchfile.reader import TorchFileReader, read_tree
from holdfast.layout import values
from holdfast.layout.files import TensorInfo
from holdfast.state.arrays import ArraysIn
from holdfast.state.capture import STATE
from holdfast.state.tensors import DTYPES
from holdfast.storage.bulk import SECTOR, BulkWriter, aligned_buffer
from holdfast.storage.folders import check_space
from holdfast.storage.local import make_folder

#: Tensors by group and name.
Groups = Mapping[str, Mapping[str, torch.Tensor]]

#: Makes the tree of a file from tensors and values.
Shape = Callable[[Groups, Mapping[str, Any]], Any]


class TorchFile:
    """A file of ``torch.save`` to be, whose tree has tensors without data where their bytes will be written."""

    def __init__(self, tree: Any) -> None:
        self._tree = tree

    def make(self, path: Path) -> None:
        """Make it, at its final size."""
        make_folder(path.parent)
        with skip_data(materialize_fake_tensors=True):
            torch.save(self._tree, path)

    def starts(self, path: Path) -> dict[int, int]:
        """Where the bytes of each tensor without data start in the file that was made, by the tensor's ``id``."""
        return {id(mine): offset for mine, offset in self._pairs(path) if isinstance(mine, FakeTensor)}

    def finish(self, path: Path) -> None:
        """Write the tensors that have data: small ones among the values."""
        with BulkWriter(path) as writer:
            for mine, offset in self._pairs(path):
                if not isinstance(mine, FakeTensor) and mine.nbytes:
                    _write(writer, offset, mine)
            writer.sync()

    def _pairs(self, path: Path) -> Iterator[tuple[torch.Tensor, int]]:
        """The tensors of the tree, each with the byte of the file that it starts at."""
        return _pairs(self._tree, read_tree(path).root)


class TorchTarget:
    """A file; ``shape`` says what the tree in it is like."""

    def __init__(self, material: Material, draft: Path, shape: Shape) -> None:
        self._material, self._draft = material, draft
        self._fakes = Fakes(material.infos)
        decoded = values.decode(dict(material.carried.shared), self._fakes, "the values")
        self._file = TorchFile(shape(self._groups(), decoded))

    def prepare(self) -> None:
        """See :class:`holdfast.conversion.target.Target`."""
        make_folder(self._draft.parent)
        check_space(self._draft.parent, sum(info.nbytes for info in self._material.infos.values()))
        self._file.make(self._draft)

    def places(self) -> Places:
        """See :class:`holdfast.conversion.target.Target`."""
        known = {id(fake): key for key, fake in self._fakes.made.items()}
        found = {known[number]: offset for number, offset in self._file.starts(self._draft).items()}
        return Places([self._draft], {key: (0, found[key]) for key in sorted(found, key=found.__getitem__)})

    def finish(self, fragments: Fragments) -> None:
        """See :class:`holdfast.conversion.target.Target`."""
        del fragments  # files of torch.save have no room for CRCs
        self._file.finish(self._draft)

    def reader(self) -> Reader:
        """See :class:`holdfast.conversion.target.Target`."""
        return TorchFileReader(self._draft, {})

    def close(self) -> Path:
        """See :class:`holdfast.conversion.target.Target`."""
        return self._draft

    def _groups(self) -> dict[str, dict[str, torch.Tensor]]:
        groups: dict[str, dict[str, torch.Tensor]] = {}
        for group, name in self._material.chosen.infos:
            if group not in {STATE, RANKS}:
                groups.setdefault(group, {})[name] = self._fakes.make((group, name))
        for group, names in self._material.chosen.tied.items():
            for alias, name in names.items():
                groups[group][alias] = groups[group][name]
        return groups


class Fakes(ArraysIn):
    """Makes tensors without data, each once."""

    def __init__(self, infos: Mapping[Key, TensorInfo]) -> None:
        super().__init__({name: info for (group, name), info in infos.items() if group == STATE})
        self._every, self._mode = infos, FakeTensorMode()
        self.made: dict[Key, torch.Tensor] = {}

    def make(self, key: Key) -> torch.Tensor:
        """The tensor of a group and name."""
        if key not in self.made:
            info = self._every[key]
            with self._mode:
                self.made[key] = torch.empty(info.shape, dtype=DTYPES[info.dtype])
        return self.made[key]

    def decode(self, tag: str, payload: Any) -> Any:
        """See :class:`holdfast.layout.values.ArrayCodec`. Arrays become tensors, which torch loads without trust."""
        if tag not in {"$tensor", "$array"}:
            return super().decode(tag, payload)
        self._info(payload)
        return self.make((STATE, payload))


def _pairs(mine: Any, theirs: Any) -> Iterator[tuple[torch.Tensor, int]]:
    if isinstance(mine, torch.Tensor):
        if isinstance(theirs, Tensor) and theirs.info.nbytes:
            yield mine, theirs.place().offset
    elif isinstance(mine, Mapping):
        for key, value in mine.items():
            yield from _pairs(value, theirs[key])
    elif isinstance(mine, list | tuple):
        for one, other in zip(mine, theirs, strict=True):
            yield from _pairs(one, other)


def _write(writer: BulkWriter, offset: int, tensor: torch.Tensor) -> None:
    lead = offset % SECTOR
    buffer = np.frombuffer(aligned_buffer(lead + tensor.nbytes), np.uint8)[lead:]
    LocalPart(tensor).copy_out(0, buffer)
    writer.write(offset, buffer.data)
