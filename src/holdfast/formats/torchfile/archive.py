"""Reading a file of ``torch.save``: the tree in its pickle, with tensors that know where their bytes lie."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from holdfast.errors import CorruptCheckpointError, FormatError
from holdfast.formats.pickles.unpickle import unpickle
from holdfast.formats.torchfile.allowed_globals import NAMES
from holdfast.formats.torchfile.dtypes import dtype_width
from holdfast.formats.torchfile.objects import TorchStorage, TorchStorageType
from holdfast.formats.torchfile.zip_reader import FileWindow, ZipMember, read_members
from holdfast.ondisk.blocks import crc64
from holdfast.ondisk.read_budget import ReadBudget

_PICKLE, _TORCHSCRIPT = "data.pkl", "constants.pkl"

#: What the byte order is called that is read.
_LITTLE = b"little"


class ArchiveTree(NamedTuple):
    """What was in a file: the tree, the bytes that it was pickled as, and a digest of these."""

    root: Any
    nbytes: int
    digest: int


def read_archive(window: FileWindow, budget: ReadBudget, names: Mapping[str, object] = NAMES) -> ArchiveTree:
    """The tree in a zip file of ``torch.save``. No tensor is read; ``names`` is what its pickle may name.

    ``budget`` earns the bytes of the pickle, and pays for what is made of them.

    Raises ``CorruptCheckpointError``, ``UnsafePickleError``, or ``FormatError`` for what is none of its files.
    """
    found = read_members(window)
    root = next(iter(found), "").partition("/")[0]
    if f"{root}/{_PICKLE}" not in found or f"{root}/{_TORCHSCRIPT}" in found:
        kind = "a TorchScript program" if f"{root}/{_TORCHSCRIPT}" in found else "a zip file"
        raise FormatError(f"{window.path} is {kind}, and no file of torch.save")
    order = found.get(f"{root}/byteorder")
    if order is not None and (order.size != len(_LITTLE) or _contents(order, window) != _LITTLE):
        raise FormatError(
            f"{window.path} was written on a big-endian machine, which holdfast does not read: load it with "
            "torch.load and save it again on this one"
        )
    pickled = found[f"{root}/{_PICKLE}"]
    raw = _contents(pickled, window)
    storages = _storages(f"{root}/data", found, window)
    budget.earn(len(raw))
    return ArchiveTree(
        unpickle(raw, names, window.label, storages, budget=budget, advice=window.advice), len(raw), crc64(raw)
    )


def _contents(entry: ZipMember, window: FileWindow) -> bytes:
    raw = window.read(entry.data(window), entry.size)
    if entry.crc and zlib.crc32(raw) != entry.crc:  # torch can be told to write none
        raise CorruptCheckpointError(f"{window.path} is damaged: its entry {entry.name!r} does not match its CRC")
    return raw


def _storages(folder: str, found: Mapping[str, ZipMember], window: FileWindow) -> Callable[[Any], TorchStorage]:
    """What persistent ids stand for: entries of the file."""
    known: dict[str, TorchStorage] = {}

    def outside(given: Any) -> TorchStorage:
        dtype, key, size = storage_id(given)
        entry = found.get(f"{folder}/{key}")
        if entry is None:
            raise ValueError(f"its storage {key!r} is not in the file")
        if key not in known:
            known[key] = TorchStorage(dtype, entry.size, window, partial(entry.data, window))
        if size != entry.size or dtype != known[key].dtype:
            raise ValueError(f"its storage {key!r} has {entry.size} bytes in the file, and should have {size}")
        return known[key]

    return outside


def storage_id(given: Any) -> tuple[str, str, int]:
    """The dtype, key and size in bytes of a storage, from its persistent id."""
    if not isinstance(given, tuple) or len(given) < 5 or given[0] != "storage":  # noqa: PLR2004 - as torch has it
        raise TypeError("it refers to what is no storage")
    _, kind, key, _, number = given[:5]
    if not isinstance(kind, TorchStorageType) or not isinstance(key, str) or type(number) is not int:
        raise TypeError("it refers to a storage without a type, a key and a size")
    return kind.dtype, key, number * dtype_width(kind.dtype)
