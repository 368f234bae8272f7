"""Which tensor lies in which file, at which byte: a pure function of names, dtypes and shapes.

Tensors are ordered by dtype width, widest first, then by name, so that each is aligned to its
dtype; they lie whole and row-major, and a new file starts when the next tensor would pass the
limit. Ranks play no part in it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import msgspec

from holdfast.errors import InvalidArgumentError, UnsupportedTensorError
from holdfast.ondisk import blocks
from holdfast.ondisk.dtypes import dtype_width
from holdfast.ondisk.header import DIMENSIONS, HeaderEntry, encode_header

#: What is to be put into files.
Item = TypeVar("Item")

#: Key of the header metadata that holds the block CRCs, in the order of the data.
CRC_KEY = "holdfast.crc64nvme"

#: Key of the header metadata that holds ``{tied name: stored name}`` as JSON.
TIED_KEY = "holdfast.tied"

#: A file takes no more tensors once their names and CRCs fill this many bytes of header.
_HEADER_BUDGET = 32_000_000

#: About what the header says of a tensor beside its name and CRCs, in bytes.
_ENTRY = 128

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


class TensorInfo(msgspec.Struct, frozen=True):
    """A tensor of a checkpoint: its dtype by safetensors name, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * dtype_width(self.dtype)


@dataclass(frozen=True)
class DataFile:
    """One safetensors file to be: its path inside the checkpoint and its tensors in order.

    ``notes`` is what else its header's metadata says.
    """

    path: str
    entries: Mapping[str, HeaderEntry]
    tied: Mapping[str, str]
    notes: Mapping[str, str] = field(default_factory=dict)

    def header(self, crcs: Iterable[int]) -> bytes:
        """The bytes before the data, with the CRC of each block of each tensor, in order."""
        metadata = {"format": "pt", **self.notes, CRC_KEY: blocks.to_hex(crcs)}
        if self.tied:
            metadata[TIED_KEY] = json.dumps(dict(sorted(self.tied.items())), separators=(",", ":"))
        return encode_header(self.entries, metadata)

    @cached_property
    def data_start(self) -> int:
        """Where the data starts, in bytes: known before any CRC is, as CRCs have a fixed width."""
        return len(self.header([0] * sum(blocks.count_blocks(entry.nbytes) for entry in self.entries.values())))

    @cached_property
    def size(self) -> int:
        """The file's size in bytes."""
        return self.data_start + sum(entry.nbytes for entry in self.entries.values())


def parse_size(size: int | str) -> int:
    """Bytes of ``5_000_000_000``, ``"5GB"``, ``"512MiB"``; decimal units as in transformers."""
    if isinstance(size, str):
        number = size.strip().upper().rstrip("BIKMGT")
        unit = size.strip().upper()[len(number) :] or "B"
        try:
            size = int(float(number) * _UNITS[unit])
        except (KeyError, ValueError, OverflowError):
            raise InvalidArgumentError(
                f"size {size!r} is not understood; write bytes, or a number with a unit such as '5GB'"
            ) from None
    if not isinstance(size, int) or size <= 0:
        raise InvalidArgumentError(f"a size must be a number of bytes above 0, or such a text as '5GB', not {size!r}")
    return size


def split_by_size(sizes: Mapping[Item, int], limit: int) -> Iterator[list[Item]]:
    """What goes into each file, in order: at most ``limit`` bytes or one item. There is one file at least."""
    shelf: list[Item] = []
    filled = 0
    for item, nbytes in sizes.items():
        if filled and filled + nbytes > limit:
            yield shelf
            shelf, filled = [], 0
        shelf.append(item)
        filled += nbytes
    yield shelf


def pack_files(group: str, tensors: Mapping[str, TensorInfo], tied: Mapping[str, str], limit: int) -> list[DataFile]:
    """The files of one group of tensors, in order.

    ``group`` is ``"model"``, ``"optimizer"``, ``"model/gen"`` (a folder and the stem of its files), or
    ``"state"`` or ``"ranks"`` (files beside the manifest). A tensor is never split over files.
    Raises ``UnsupportedTensorError`` for a tensor that could not be read back.
    """
    order = sorted(tensors, key=lambda name: (-dtype_width(tensors[name].dtype), name))
    shelves: list[list[str]] = []
    filled = named = 0
    for name in order:
        nbytes = tensors[name].nbytes
        if not shelves or filled + nbytes > limit or named > _HEADER_BUDGET:
            shelves.append([])
            filled = named = 0
        shelves[-1].append(name)
        filled += nbytes
        named += _named(name, tensors[name])
    return [
        _data_file(path, _entries(shelf, tensors), tied)
        for path, shelf in zip(_paths(group, len(shelves)), shelves, strict=True)
    ]


def _data_file(path: str, entries: Mapping[str, HeaderEntry], tied: Mapping[str, str]) -> DataFile:
    return DataFile(path, entries, {alias: name for alias, name in tied.items() if name in entries})


def _named(name: str, info: TensorInfo) -> int:
    """About how many bytes of header a tensor takes. Raises ``UnsupportedTensorError`` where none can hold it."""
    if name == "__metadata__":
        raise UnsupportedTensorError(f"a tensor has the name {name!r}, which safetensors files keep for themselves")
    if len(info.shape) > DIMENSIONS:
        raise UnsupportedTensorError(f"tensor {name!r} has {len(info.shape)} dimensions; there may be {DIMENSIONS}")
    try:
        quoted = msgspec.json.encode(name)
    except UnicodeEncodeError as error:
        raise UnsupportedTensorError(f"a tensor has the name {name!r}, which is no text: {error}") from error
    return len(quoted) + _ENTRY + blocks.DIGITS * blocks.count_blocks(info.nbytes)


def _entries(names: Sequence[str], tensors: Mapping[str, TensorInfo]) -> dict[str, HeaderEntry]:
    entries, reached = {}, 0
    for name in names:
        info = tensors[name]
        entries[name] = HeaderEntry(info.dtype, info.shape, (reached, reached + info.nbytes))
        reached += info.nbytes
    return entries


def file_stem(group: str) -> str:
    """The path of a group's files inside the checkpoint, without number and ending."""
    return group if group in {"state", "ranks"} else f"{group}/{group.split('/', maxsplit=1)[0]}"


def _paths(group: str, n: int) -> list[str]:
    if n == 1:
        return [f"{file_stem(group)}.safetensors"]
    return [f"{file_stem(group)}-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]


def index_path(group: str) -> str:
    """Where the index of a group of several files lies."""
    return f"{file_stem(group)}.safetensors.index.json"


def build_index(files: Sequence[DataFile]) -> bytes:
    """The index of several files as Hugging Face writes it: total size, and each tensor's file."""
    total = sum(entry.nbytes for file in files for entry in file.entries.values())
    weight_map = {name: file.path.rsplit("/")[-1] for file in files for name in file.entries}
    table = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(table, indent=2).encode() + b"\n"
