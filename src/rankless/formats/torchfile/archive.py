"""Reading a file of ``torch.save`` in its zip format: the tree in its pickle, with the locations of the tensors.

:mod:`rankless.formats.torch_file` and the readers of DCP and NxD call it, on each rank or process that opens such
files; :class:`~rankless.conversion.torch_target.PlannedTorchFile` does on rank 0, for a file that is only in memory,
and :mod:`rankless.formats.torchfile.legacy_file` parses ids of storages with it. No pickle may name a global that is
not in ``names``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from rankless.errors import CorruptCheckpointError, FormatError
from rankless.formats.pickles.unpickle import unpickle
from rankless.formats.torchfile.allowed_globals import NAMES
from rankless.formats.torchfile.torch_dtypes import dtype_width
from rankless.formats.torchfile.torch_placeholders import TorchStorage, TorchStorageType
from rankless.formats.torchfile.zip_reader import FileWindow, ZipMember, read_members
from rankless.ondisk.block_crcs import crc64
from rankless.ondisk.read_budget import ReadBudget

PICKLE, _TORCHSCRIPT = "data.pkl", "constants.pkl"

#: The contents of the entry ``byteorder`` in files that can be read.
_LITTLE = b"little"


class ArchiveTree(NamedTuple):
    """The tree in a file, the size of its pickle in bytes, and the CRC of the pickle.

    Readers put ``digest`` into their fingerprints, which ranks compare: it may depend on the bytes alone.
    """

    root: Any
    nbytes: int
    digest: int


def read_archive(window: FileWindow, budget: ReadBudget, names: Mapping[str, object] = NAMES) -> ArchiveTree:
    """Return the tree in a zip file of ``torch.save``. No tensor data is read.

    ``names`` are the globals that its pickle may name. The bytes of the pickle are added to ``budget``, and reading it
    is charged to it.

    Raises ``CorruptCheckpointError``, ``UnsafePickleError``, or ``FormatError`` if ``torch.save`` did not write it.
    """
    members = read_members(window)
    root = next(iter(members), "").partition("/")[0]
    if f"{root}/{PICKLE}" not in members or f"{root}/{_TORCHSCRIPT}" in members:
        kind = "a TorchScript program" if f"{root}/{_TORCHSCRIPT}" in members else "a zip file"
        raise FormatError(f"{window.path} is {kind}, not a file of torch.save")
    order = members.get(f"{root}/byteorder")
    if order is not None and (order.size != len(_LITTLE) or _read_member(order, window) != _LITTLE):
        raise FormatError(
            f"{window.path} was written on a big-endian machine, which rankless does not read: load it with "
            "torch.load and save it again on this one"
        )
    raw = _read_member(members[f"{root}/{PICKLE}"], window)
    load_storage = _storage_loader(f"{root}/data", members, window)
    budget.earn(len(raw))
    tree = unpickle(raw, names, window.label, load_storage, budget=budget, advice=window.advice)
    return ArchiveTree(tree, len(raw), crc64(raw))


def _read_member(entry: ZipMember, window: FileWindow) -> bytes:
    raw = window.read(entry.find_data(window), entry.size)
    if entry.crc and zlib.crc32(raw) != entry.crc:  # 0: torch was configured to write no CRC
        raise CorruptCheckpointError(f"{window.path} is corrupt: its entry {entry.name!r} does not match its CRC")
    return raw


def _storage_loader(folder: str, members: Mapping[str, ZipMember], window: FileWindow) -> Callable[[Any], TorchStorage]:
    """Return a function that returns the storage for a persistent id: an entry of the file."""
    storages: dict[str, TorchStorage] = {}

    def load_storage(persistent_id: Any) -> TorchStorage:
        dtype, key, size = parse_storage_id(persistent_id)
        entry = members.get(f"{folder}/{key}")
        if entry is None:
            raise ValueError(f"a tensor refers to storage {key!r}, which is not in the file")
        if key not in storages:
            storages[key] = TorchStorage(dtype, entry.size, window, partial(entry.find_data, window))
        if size != entry.size or dtype != storages[key].dtype:
            raise ValueError(
                f"storage {key!r} has {entry.size} bytes of {storages[key].dtype}, but a tensor refers to {size} bytes "
                f"of {dtype}"
            )
        return storages[key]

    return load_storage


def parse_storage_id(persistent_id: Any) -> tuple[str, str, int]:
    """Return the dtype, the key and the size in bytes of a storage, from its persistent id."""
    if (
        not isinstance(persistent_id, tuple)
        or len(persistent_id) < 5  # noqa: PLR2004 - as torch has it
        or persistent_id[0] != "storage"
    ):
        raise TypeError("a persistent id of its pickle is not that of a storage")
    _, kind, key, _, number = persistent_id[:5]
    if not isinstance(kind, TorchStorageType) or not isinstance(key, str) or type(number) is not int:
        raise TypeError("the persistent id of a storage must have a type, a key and a size")
    return kind.dtype, key, number * dtype_width(kind.dtype)
