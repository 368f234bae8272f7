"""Files as ``torch.save`` wrote them before version 1.6: pickles one after another, then the bytes of storages.

Source: ``_legacy_save`` in ``torch/serialization.py``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from holdfast.errors import CorruptCheckpointError
from holdfast.formats.pickles.unpickle import unpickle_sequence
from holdfast.formats.pickles.unpickler import TruncatedPickleError
from holdfast.formats.torchfile.allowed_globals import NAMES
from holdfast.formats.torchfile.archive import ArchiveTree, storage_id
from holdfast.formats.torchfile.objects import TorchStorage
from holdfast.formats.torchfile.zip_reader import FileWindow
from holdfast.ondisk.blocks import crc64
from holdfast.ondisk.read_budget import ReadBudget

#: What such a file begins with: a pickle of torch's magic number.
MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."

#: The pickles: the magic number, the protocol, facts about the machine, the tree, the keys of storages.
_PICKLES = 5

_FIRST, _LIMIT = 2**20, 2**30

_SIZE = struct.Struct("<q")


def read_legacy_archive(window: FileWindow, budget: ReadBudget, names: Mapping[str, object] = NAMES) -> ArchiveTree:
    """The tree in such a file, whose pickle may name ``names``. Raises ``CorruptCheckpointError`` or ``UnsafePickleError``.

    ``budget`` earns the bytes of the pickles, and pays for what is made of them.
    """
    size = _FIRST
    while True:  # how long the pickles are is known when they have been read
        raw = window.read(0, min(size, window.size))
        own = ReadBudget(len(raw), least=0)
        own.left += budget.left
        try:
            tree = _parse(raw, window, own, names)
        except TruncatedPickleError:
            if size >= min(window.size, _LIMIT):
                raise
            size *= 8
            continue
        budget.earn(tree.nbytes)
        budget.spend(own.spent)
        return tree


def _parse(raw: bytes, window: FileWindow, budget: ReadBudget, names: Mapping[str, object]) -> ArchiveTree:
    known: dict[str, TorchStorage] = {}
    starts: dict[str, int] = {}
    storages = _storages(known, starts, window)
    (_, _, machine, root, keys), end = unpickle_sequence(
        raw, _PICKLES, names, window.label, storages, budget=budget, advice=window.advice
    )
    is_row = isinstance(keys, list) and all(isinstance(key, str | int) for key in keys)
    if not isinstance(machine, dict) or machine.get("little_endian") is not True or not is_row:
        raise CorruptCheckpointError(f"{window.label} was written on a big-endian machine, or is damaged")
    at = end
    for key in keys:
        storage = known.get(str(key))
        (number,) = _SIZE.unpack(window.read(at, _SIZE.size))
        if storage is None or number * storage.width != storage.nbytes:
            raise CorruptCheckpointError(
                f"{window.label} is damaged: its storage {str(key)[:40]!r} is not what its pickle says"
            )
        starts[str(key)] = at + _SIZE.size
        at += _SIZE.size + storage.nbytes
    if at > window.size or starts.keys() != known.keys():
        raise CorruptCheckpointError(f"{window.label} is damaged or cut short: it ends inside its storages")
    return ArchiveTree(root, end, crc64(raw[:end]))


def _storages(
    known: dict[str, TorchStorage], starts: Mapping[str, int], window: FileWindow
) -> Callable[[Any], TorchStorage]:
    def outside(given: Any) -> TorchStorage:
        dtype, key, size = storage_id(given)
        if len(given) > 5 and given[5] is not None:  # noqa: PLR2004 - views of storages, long gone
            raise TypeError("it has views of storages, which no torch has written since 2017")
        return known.setdefault(key, TorchStorage(dtype, size, window, partial(starts.__getitem__, key)))

    return outside
