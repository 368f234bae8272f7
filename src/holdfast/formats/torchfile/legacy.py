"""Files as ``torch.save`` wrote them before version 1.6: pickles one after another, then the bytes of storages.

Source: ``_legacy_save`` in ``torch/serialization.py``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from holdfast.errors import DamagedError
from holdfast.formats.pickles.machine import CutShortError
from holdfast.formats.pickles.unpickle import unpickle_row
from holdfast.formats.torchfile.archive import Tree, storage_id
from holdfast.formats.torchfile.names import NAMES
from holdfast.formats.torchfile.objects import Storage
from holdfast.formats.torchfile.zips import Window
from holdfast.layout.blocks import crc64
from holdfast.layout.budget import Budget

#: What such a file begins with: a pickle of torch's magic number.
MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."

#: The pickles: the magic number, the protocol, facts about the machine, the tree, the keys of storages.
_PICKLES = 5

_FIRST, _LIMIT = 2**20, 2**30

_SIZE = struct.Struct("<q")


def read(window: Window, budget: Budget, names: Mapping[str, object] = NAMES) -> Tree:
    """The tree in such a file, whose pickle may name ``names``. Raises ``DamagedError`` or ``UnsafePickleError``.

    ``budget`` earns the bytes of the pickles, and pays for what is made of them.
    """
    size = _FIRST
    while True:  # how long the pickles are is known when they have been read
        raw = window.read(0, min(size, window.size))
        own = Budget(len(raw), least=0)
        own.left += budget.left
        try:
            tree = _parse(raw, window, own, names)
        except CutShortError:
            if size >= min(window.size, _LIMIT):
                raise
            size *= 8
            continue
        budget.earn(tree.nbytes)
        budget.spend(own.spent)
        return tree


def _parse(raw: bytes, window: Window, budget: Budget, names: Mapping[str, object]) -> Tree:
    known: dict[str, Storage] = {}
    starts: dict[str, int] = {}
    storages = _storages(known, starts, window)
    (_, _, machine, root, keys), end = unpickle_row(
        raw, _PICKLES, names, window.label, storages, budget=budget, advice=window.advice
    )
    is_row = isinstance(keys, list) and all(isinstance(key, str | int) for key in keys)
    if not isinstance(machine, dict) or machine.get("little_endian") is not True or not is_row:
        raise DamagedError(f"{window.label} was written on a big-endian machine, or is damaged")
    at = end
    for key in keys:
        storage = known.get(str(key))
        (number,) = _SIZE.unpack(window.read(at, _SIZE.size))
        if storage is None or number * storage.width != storage.nbytes:
            raise DamagedError(f"{window.label} is damaged: its storage {str(key)[:40]!r} is not what its pickle says")
        starts[str(key)] = at + _SIZE.size
        at += _SIZE.size + storage.nbytes
    if at > window.size or starts.keys() != known.keys():
        raise DamagedError(f"{window.label} is damaged or cut short: it ends inside its storages")
    return Tree(root, end, crc64(raw[:end]))


def _storages(known: dict[str, Storage], starts: Mapping[str, int], window: Window) -> Callable[[Any], Storage]:
    def outside(given: Any) -> Storage:
        dtype, key, size = storage_id(given)
        if len(given) > 5 and given[5] is not None:  # noqa: PLR2004 - views of storages, long gone
            raise TypeError("it has views of storages, which no torch has written since 2017")
        return known.setdefault(key, Storage(dtype, size, window, partial(starts.__getitem__, key)))

    return outside
