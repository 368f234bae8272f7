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

from holdfast.conversion.fakes import Fakes, Shape
from holdfast.conversion.target import Material, Places, Spot
from holdfast.engine.local import LocalPart
from holdfast.engine.transfer import Fragments
from holdfast.formats.reader import Reader
from holdfast.formats.torchfile.objects import Tensor
from holdfast.formats.torchfile.reader import TorchFileReader, read_tree
from holdfast.storage.bulk import CachedWriter
from holdfast.storage.folders import Lock, check_space, claim
from holdfast.storage.local import created, make_folder


class TorchFile:
    """A file of ``torch.save`` to be, whose tree has tensors without data where their bytes will be written."""

    def __init__(self, tree: Any) -> None:
        self._tree = tree

    def make(self, path: Path) -> None:
        """Make it, at its final size."""
        make_folder(path.parent)
        with created(path) as file, skip_data(materialize_fake_tensors=True):
            torch.save(self._tree, file)  # which has a path's name inside, given one

    def starts(self, path: Path) -> dict[int, int]:
        """Where the bytes of each tensor without data start in the file that was made, by the tensor's ``id``."""
        return {id(mine): offset for mine, offset in self._pairs(path) if isinstance(mine, FakeTensor)}

    def finish(self, path: Path) -> None:
        """Write the tensors that have data: small ones among the values."""
        with CachedWriter(path) as writer:
            for mine, offset in self._pairs(path):
                if not isinstance(mine, FakeTensor) and mine.nbytes:
                    writer.write(offset, memoryview(raw(mine)))
            writer.sync()

    def _pairs(self, path: Path) -> Iterator[tuple[torch.Tensor, int]]:
        """The tensors of the tree, each with the byte of the file that it starts at."""
        return ((mine, theirs.place().offset) for mine, theirs in pairs(self._tree, read_tree(path).root))


class TorchTarget:
    """A file; ``shape`` says what the tree in it is like."""

    def __init__(self, material: Material, draft: Path, shape: Shape) -> None:
        self._material, self._draft = material, draft
        self._fakes = Fakes(material.infos)
        self._file = TorchFile(self._fakes.tree(material, shape))

    def prepare(self) -> None:
        """See :class:`holdfast.conversion.target.Target`."""
        make_folder(self._draft.parent)
        check_space(self._draft.parent, sum(info.nbytes for info in self._material.infos.values()))
        self._file.make(self._draft)

    def places(self) -> Places:
        """See :class:`holdfast.conversion.target.Target`."""
        known = {id(fake): key for key, fake in self._fakes.made.items()}
        found = {known[number]: offset for number, offset in self._file.starts(self._draft).items()}
        infos = self._material.infos
        ordered = sorted(found, key=found.__getitem__)
        return Places([self._draft], {key: [Spot(0, found[key], 0, infos[key].nbytes)] for key in ordered})

    def finish(self, fragments: Fragments) -> None:
        """See :class:`holdfast.conversion.target.Target`."""
        del fragments  # files of torch.save have no room for CRCs
        self._file.finish(self._draft)

    def reader(self) -> Reader:
        """See :class:`holdfast.conversion.target.Target`."""
        return TorchFileReader(self._draft, {})

    @property
    def made(self) -> Path:
        """See :class:`holdfast.conversion.target.Target`."""
        return self._draft

    def close(self) -> None:
        """See :class:`holdfast.conversion.target.Target`."""


class AloneTarget(TorchTarget):
    """A file by itself. Until it is complete it lies in a hidden folder, whose lock tells that it is worked on."""

    def __init__(self, material: Material, draft: Path, shape: Shape) -> None:
        super().__init__(material, draft / "file", shape)
        self._lock: Lock | None = None

    def prepare(self) -> None:
        """See :class:`holdfast.conversion.target.Target`."""
        self._lock = claim(self.made.parent)
        super().prepare()

    def close(self) -> None:
        """See :class:`holdfast.conversion.target.Target`."""
        if self._lock is not None:
            self._lock.close()


def pairs(mine: Any, theirs: Any) -> Iterator[tuple[torch.Tensor, Tensor]]:
    """The tensors of a tree that have bytes, with what they are in the same tree as it was read."""
    if isinstance(mine, torch.Tensor):
        if isinstance(theirs, Tensor) and theirs.info.nbytes:
            yield mine, theirs
    elif isinstance(mine, Mapping):
        for key, value in mine.items():
            yield from pairs(value, theirs[key])
    elif isinstance(mine, list | tuple):
        for one, other in zip(mine, theirs, strict=True):
            yield from pairs(one, other)


def saved(value: Any) -> bytes:
    """What ``torch.save`` makes of something small."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def raw(tensor: torch.Tensor) -> bytes:
    """Its bytes, in row-major order."""
    data = np.empty(tensor.nbytes, np.uint8)
    LocalPart(tensor).copy_out(0, data)
    return data.tobytes()
