"""A read-only view of one checkpoint of any format: what is in it, and any part of any tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch

from holdfast.catalog import open_latest
from holdfast.engine.checks import Checks
from holdfast.engine.local import LocalPart, Nowhere
from holdfast.engine.read import read_pieces
from holdfast.engine.transfer import Piece
from holdfast.engine.woven import Source, Woven
from holdfast.errors import DamagedError, GoneError, InvalidArgumentError
from holdfast.formats.reader import Reader, as_opened
from holdfast.layout.blocks import BLOCK
from holdfast.layout.dtypes import width
from holdfast.layout.files import TensorInfo
from holdfast.state.arrays import ArraysIn
from holdfast.state.tensors import DTYPES
from holdfast.storage.local import local_path

#: Tensors inside values, which are reached through them.
_INSIDE = frozenset({"state", "ranks"})


#: Bytes verified at a time, a multiple of a block; and the most tensors.
_BATCH, _MANY = 256 * 2**20, 4096


class Verified(NamedTuple):
    """``nbytes`` of a tensor were read; ``problem`` says what is wrong with them, if anything is.

    An empty ``name`` stands for a file without tensor data.
    """

    name: str
    nbytes: int
    problem: str | None


class _Part(NamedTuple):
    """Bytes ``[start, stop)`` of a stored tensor, by its number."""

    tensor: int
    start: int
    stop: int


class Checkpoint:
    """One checkpoint, open for reading. Tensors are named by their group: ``"model/layers.0.weight"``.

    Whatever is read is verified against its CRCs, in whole blocks of 16 MiB. Files are opened when they are read: where
    another process has replaced or removed the checkpoint by then, ``GoneError`` is raised.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._stored = sorted((group, name) for group, names in reader.groups.items() for name in names)
        self._number = {f"{group}/{name}": number for number, (group, name) in enumerate(self._stored)}
        for group, names in reader.tied.items():
            for alias, name in names.items():
                self._number.setdefault(f"{group}/{alias}", self._number[f"{group}/{name}"])
        self._checks = Checks(reader, self._stored)

    @property
    def path(self) -> Path:
        """Its folder or file."""
        return self._reader.path

    @property
    def format(self) -> str:
        """The name of its format."""
        return self._reader.format

    def keys(self) -> list[str]:
        """The names of the tensors of models and optimizers; further names of tied ones are not among them."""
        return [f"{group}/{name}" for group, name in self._stored if group not in _INSIDE]

    def info(self, name: str) -> TensorInfo:
        """The dtype (by its safetensors name), shape and size in bytes of a tensor."""
        return self._info(self._find(name))

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements ``[start, stop)`` of a tensor in row-major order, as a 1-D CPU tensor."""
        info = self.info(name)
        size = width(info.dtype)
        if not 0 <= start <= stop <= info.nbytes // size:
            raise InvalidArgumentError(
                f"{name} has {info.nbytes // size} elements; there are no elements {start} to {stop}"
            )
        first, last = start * size // BLOCK * BLOCK, min(info.nbytes, -(-stop * size // BLOCK) * BLOCK)
        blocks = torch.empty(max(0, last - first) // size, dtype=DTYPES[info.dtype], device="cpu")
        self._fill({_Part(self._find(name), first, first + blocks.nbytes): blocks})
        wanted = blocks[start - first // size : stop - first // size]
        return wanted if wanted.numel() == blocks.numel() else wanted.clone()

    def __getitem__(self, name: str) -> torch.Tensor:
        """A whole tensor, on the CPU."""
        info = self.info(name)
        tensor = torch.empty(info.shape, dtype=DTYPES[info.dtype], device="cpu")
        self._fill({_Part(self._find(name), 0, info.nbytes): tensor})
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._number

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    @property
    def values(self) -> dict[str, Any]:
        """The plain values, tensors in them included: ``optimizer``, ``scheduler``, ``user_content``, as saved."""
        found, arrays = self._decoded()
        inside = {self._number[f"state/{name}"]: tensor for name, tensor in arrays.items()}
        self._fill({_Part(number, 0, tensor.nbytes): tensor for number, tensor in inside.items()})
        return found

    def _decoded(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """The values, and the tensors in them, by name, to be filled."""
        arrays, own = ArraysIn(self._reader.groups.get("state", {})), ArraysIn(self._reader.groups.get("ranks", {}))
        with as_opened(self._reader):
            return dict(self._reader.values(0, arrays, own).shared), arrays.tensors

    def verify(self) -> Iterator[Verified]:
        """Read every byte and check every CRC, and tell of each part read. What is damaged is told, not raised.

        Raises ``GoneError`` where another process replaces or removes the checkpoint meanwhile.
        """
        with as_opened(self._reader):
            for part in self._parts():
                if part.problem is not None and not self._reader.is_current():
                    raise GoneError(f"{self.path} was replaced or removed while it was verified")
                yield part

    def _parts(self) -> Iterator[Verified]:
        try:
            self._reader.check_files()
            self._decoded()
        except DamagedError as error:
            yield Verified("", 0, str(error))
        for batch in self._batches():
            yield from self._verify(batch)

    def _verify(self, batch: list[_Part]) -> Iterator[Verified]:
        files: dict[Source, int] = {}
        try:
            pieces = [piece for part in batch for piece in self._pieces(part, files)]
            found = read_pieces(list(files), pieces, lambda _: Nowhere())
            problems = {tensor: str(error) for tensor, error in self._checks.damage(found, {})}
        except DamagedError as error:
            if len(batch) > 1:
                for part in batch:
                    yield from self._verify([part])
                return
            problems = {batch[0].tensor: str(error)}
        for number, start, stop in batch:
            yield Verified("/".join(self._stored[number]), stop - start, problems.get(number))

    def _batches(self) -> Iterator[list[_Part]]:
        """All tensors in the order of their files, in parts that end at blocks, about ``_BATCH`` bytes at a time."""
        batch: list[_Part] = []
        filled = 0
        for number in sorted(range(len(self._stored)), key=self._position):
            nbytes = self._info(number).nbytes
            for start in range(0, max(1, nbytes), _BATCH):
                batch.append(_Part(number, start, min(nbytes, start + _BATCH)))
                filled += batch[-1].stop - start
                if filled >= _BATCH or len(batch) == _MANY:
                    yield batch
                    batch, filled = [], 0
        yield batch

    def _find(self, name: str) -> int:
        if name not in self._number:
            close = [key for key in self._number if name in key][:3]
            raise KeyError(f"{name!r} is not in {self.path}" + (f"; did you mean {', '.join(close)}?" if close else ""))
        return self._number[name]

    def _info(self, number: int) -> TensorInfo:
        group, name = self._stored[number]
        return self._reader.groups[group][name]

    def _position(self, number: int) -> tuple[Path, int]:
        extents = self._reader.extents(*self._stored[number], 0, self._info(number).nbytes)
        first = extents[0] if extents else None
        if first is not None and isinstance(first.file, Woven):
            return first.file.parts[0].near
        return (first.file, first.offset) if first is not None and isinstance(first.file, Path) else (self.path, 0)

    def _fill(self, parts: Mapping[_Part, torch.Tensor]) -> None:
        """Read parts of stored tensors, whole blocks, into tensors of that size, and verify them."""
        files: dict[Source, int] = {}
        pieces = [piece for part in parts for piece in self._pieces(part, files)]
        sinks = {part.tensor: LocalPart(tensor) for part, tensor in parts.items()}
        with as_opened(self._reader):
            self._checks.check_own(read_pieces(list(files), pieces, sinks.__getitem__))

    def _pieces(self, part: _Part, files: dict[Source, int]) -> Iterator[Piece]:
        for extent in self._reader.extents(*self._stored[part.tensor], part.start, part.stop):
            file = files.setdefault(extent.file, len(files))
            yield Piece(part.tensor, extent.start, extent.stop, extent.start - part.start, file, extent.offset)


def open(path: str | PathLike[str], keys: Mapping[str, str] | None = None) -> Checkpoint:  # noqa: A001 - the public name
    """Open a checkpoint of any format for reading; of a run's folder, the latest.

    ``keys`` says where a checkpoint of another system has its parts, if they are not found by their names:
    ``{"model": "app.net"}``.

    Raises ``NoCheckpointError``, ``FormatError`` or ``DamagedError``.
    """
    return Checkpoint(open_latest(local_path(path), keys))
