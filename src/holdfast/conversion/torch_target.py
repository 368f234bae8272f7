"""Into one file of ``torch.save``.

torch itself writes it, with tensors that have no data; where these lie in the file is read back, and filled.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.serialization import skip_data

from holdfast.conversion.fake_tensors import FakeTensors, Shape
from holdfast.conversion.target import ConversionSource, FileLayout, FileSpan
from holdfast.engine.io.requests import Fragments
from holdfast.engine.io.tensor_bytes import TensorBytes
from holdfast.formats.reader import Reader
from holdfast.formats.torch_file import TorchFileReader, read_tree
from holdfast.formats.torchfile.objects import TorchTensor
from holdfast.storage.direct_io import BufferedWriter
from holdfast.storage.directories import DirectoryLock, check_space, create_locked
from holdfast.storage.posix import make_directory, new_file


class PlannedTorchFile:
    """A file of ``torch.save`` to be, whose tree has tensors without data where their bytes will be written."""

    def __init__(self, tree: Any) -> None:
        self._tree = tree

    def make(self, path: Path) -> None:
        """Make it, at its final size."""
        make_directory(path.parent)
        with new_file(path) as file, skip_data(materialize_fake_tensors=True):
            torch.save(self._tree, file)  # which has a path's name inside, given one

    def starts(self, path: Path) -> dict[int, int]:
        """Where the bytes of each tensor without data start in the file that was made, by the tensor's ``id``."""
        return {id(mine): offset for mine, offset in self._pairs(path) if isinstance(mine, FakeTensor)}

    def finish(self, path: Path) -> None:
        """Write the tensors that have data: small ones among the values."""
        with BufferedWriter(path) as writer:
            for mine, offset in self._pairs(path):
                if not isinstance(mine, FakeTensor) and mine.nbytes:
                    writer.write(offset, memoryview(raw_bytes(mine)))
            writer.sync()

    def _pairs(self, path: Path) -> Iterator[tuple[torch.Tensor, int]]:
        """The tensors of the tree, each with the byte of the file that it starts at."""
        return ((mine, theirs.place().offset) for mine, theirs in state_dict_pairs(self._tree, read_tree(path).root))


class TorchTarget:
    """A file; ``shape`` says what the tree in it is like."""

    def __init__(self, material: ConversionSource, draft: Path, shape: Shape) -> None:
        self._material, self._draft = material, draft
        self._fakes = FakeTensors(material.infos)
        self._file = PlannedTorchFile(self._fakes.tree(material, shape))

    def prepare(self) -> None:
        """See :class:`holdfast.conversion.target.ConversionTarget`."""
        make_directory(self._draft.parent)
        check_space(self._draft.parent, sum(info.nbytes for info in self._material.infos.values()))
        self._file.make(self._draft)

    def places(self) -> FileLayout:
        """See :class:`holdfast.conversion.target.ConversionTarget`."""
        known = {id(fake): key for key, fake in self._fakes.made.items()}
        found = {known[number]: offset for number, offset in self._file.starts(self._draft).items()}
        infos = self._material.infos
        ordered = sorted(found, key=found.__getitem__)
        return FileLayout([self._draft], {key: [FileSpan(0, found[key], 0, infos[key].nbytes)] for key in ordered})

    def finish(self, fragments: Fragments) -> None:
        """See :class:`holdfast.conversion.target.ConversionTarget`."""
        del fragments  # files of torch.save have no room for CRCs
        self._file.finish(self._draft)

    def reader(self) -> Reader:
        """See :class:`holdfast.conversion.target.ConversionTarget`."""
        return TorchFileReader(self._draft, {})

    @property
    def made(self) -> Path:
        """See :class:`holdfast.conversion.target.ConversionTarget`."""
        return self._draft

    def close(self) -> None:
        """See :class:`holdfast.conversion.target.ConversionTarget`."""


class SingleFileTarget(TorchTarget):
    """A file by itself. Until it is complete it lies in a hidden folder, whose lock tells that it is worked on."""

    def __init__(self, material: ConversionSource, draft: Path, shape: Shape) -> None:
        super().__init__(material, draft / "file", shape)
        self._lock: DirectoryLock | None = None

    def prepare(self) -> None:
        """See :class:`holdfast.conversion.target.ConversionTarget`."""
        self._lock = create_locked(self.made.parent)
        super().prepare()

    def close(self) -> None:
        """See :class:`holdfast.conversion.target.ConversionTarget`."""
        if self._lock is not None:
            self._lock.close()


def state_dict_pairs(mine: Any, theirs: Any) -> Iterator[tuple[torch.Tensor, TorchTensor]]:
    """The tensors of a tree that have bytes, with what they are in the same tree as it was read."""
    if isinstance(mine, torch.Tensor):
        if isinstance(theirs, TorchTensor) and theirs.info.nbytes:
            yield mine, theirs
    elif isinstance(mine, Mapping):
        for key, value in mine.items():
            yield from state_dict_pairs(value, theirs[key])
    elif isinstance(mine, list | tuple):
        for one, other in zip(mine, theirs, strict=True):
            yield from state_dict_pairs(one, other)


def as_saved_tensor(value: Any) -> bytes:
    """What ``torch.save`` makes of something small."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """Its bytes, in row-major order."""
    data = np.empty(tensor.nbytes, np.uint8)
    TensorBytes(tensor).copy_out(0, data)
    return data.tobytes()
