"""A read-only view of one checkpoint of any format: what is in it, and any part of any tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from holdfast.catalog import latest
from holdfast.engine.checks import Checks
from holdfast.engine.local import LocalPart
from holdfast.engine.read import read_pieces
from holdfast.engine.transfer import Piece
from holdfast.errors import InvalidArgumentError
from holdfast.formats.detect import is_checkpoint, open_reader
from holdfast.formats.reader import Reader
from holdfast.layout.blocks import BLOCK
from holdfast.layout.dtypes import width
from holdfast.layout.files import TensorInfo
from holdfast.state.arrays import ArraysIn
from holdfast.state.tensors import DTYPES

#: Tensors inside values, which are reached through them.
_INSIDE = frozenset({"state", "ranks"})


class Checkpoint:
    """One checkpoint, open for reading. Tensors are named by their group: ``"model/layers.0.weight"``.

    Whatever is read is verified against its CRCs, in whole blocks of 16 MiB.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._keys = {
            f"{group}/{name}": (group, name) for group, names in sorted(reader.groups.items()) for name in sorted(names)
        }
        tied = {
            f"{group}/{alias}": (group, name) for group, names in reader.tied.items() for alias, name in names.items()
        }
        self._places = {**tied, **self._keys}
        self._number = {key: i for i, key in enumerate(sorted(self._keys.values()))}

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
        return [key for key, (group, _) in self._keys.items() if group not in _INSIDE]

    def info(self, name: str) -> TensorInfo:
        """The dtype (by its safetensors name), shape and size in bytes of a tensor."""
        group, stored = self._place(name)
        return self._reader.groups[group][stored]

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements ``[start, stop)`` of a tensor in row-major order, as a 1-D CPU tensor."""
        info = self.info(name)
        size = width(info.dtype)
        if not 0 <= start <= stop <= info.nbytes // size:
            raise InvalidArgumentError(
                f"{name} has {info.nbytes // size} elements; there are no elements {start} to {stop}"
            )
        first, last = start * size // BLOCK * BLOCK, min(info.nbytes, -(-stop * size // BLOCK) * BLOCK)
        blocks = torch.empty(max(0, last - first) // size, dtype=DTYPES[info.dtype])
        self._fill([(self._place(name), blocks, first, first + blocks.nbytes)])
        return (
            blocks[start - first // size : stop - first // size].clone() if blocks.numel() != stop - start else blocks
        )

    def __getitem__(self, name: str) -> torch.Tensor:
        """A whole tensor, on the CPU."""
        info = self.info(name)
        tensor = torch.empty(info.shape, dtype=DTYPES[info.dtype])
        self._fill([(self._place(name), tensor, 0, info.nbytes)])
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    @property
    def values(self) -> dict[str, Any]:
        """The plain values, tensors in them included: ``optimizer``, ``scheduler``, ``user_content``, as saved."""
        arrays, own = ArraysIn(self._reader.groups.get("state", {})), ArraysIn(self._reader.groups.get("ranks", {}))
        found = dict(self._reader.values(0, arrays, own).shared)
        self._fill([(("state", name), tensor, 0, tensor.nbytes) for name, tensor in arrays.tensors.items()])
        return found

    def verify(self) -> Iterator[tuple[str, int]]:
        """Check every byte: yields each tensor's name and size once verified, or raises ``DamagedError``."""
        self._reader.check_files()
        for name, (group, stored) in self._keys.items():
            nbytes = self._reader.groups[group][stored].nbytes
            scratch = torch.empty(min(nbytes, BLOCK), dtype=torch.uint8)
            for start in range(0, nbytes, BLOCK):
                stop = min(nbytes, start + BLOCK)
                self._fill([((group, stored), scratch[: stop - start], start, stop)])
            yield name, nbytes

    def _place(self, name: str) -> tuple[str, str]:
        if name not in self._places:
            close = [key for key in self._keys if name in key][:3]
            raise KeyError(f"{name!r} is not in {self.path}" + (f"; did you mean {', '.join(close)}?" if close else ""))
        return self._places[name]

    def _fill(self, wanted: Sequence[tuple[tuple[str, str], torch.Tensor, int, int]]) -> None:
        """Read bytes ``[start, stop)`` of stored tensors into tensors of that size, and verify them."""
        files: dict[Path, int] = {}
        pieces, parts = [], {}
        for key, tensor, start, stop in wanted:
            number = self._number[key]
            parts[number] = LocalPart(tensor)
            for extent in self._reader.extents(*key, start, stop):
                file = files.setdefault(extent.file, len(files))
                pieces += [Piece(number, extent.start, extent.stop, extent.start - start, file, extent.offset)]
        found = read_pieces(list(files), pieces, parts.__getitem__)
        Checks(self._reader, sorted(self._keys.values())).check_own(found)


def open(path: str | PathLike[str]) -> Checkpoint:  # noqa: A001 - the public name
    """Open a checkpoint of any format for reading; of a run's folder, the latest.

    Raises ``NoCheckpointError``, ``FormatError`` or ``DamagedError``.
    """
    place = Path(path).absolute()
    if place.is_dir() and not is_checkpoint(place):
        place = latest(place).path
    return Checkpoint(open_reader(place))
