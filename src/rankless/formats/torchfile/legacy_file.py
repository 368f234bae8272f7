"""Reading files of ``torch.save`` before torch 1.6: consecutive pickles, then the bytes of the storages.

Source: ``_legacy_save`` in ``torch/serialization.py``.

:mod:`rankless.formats.torch_file` and the reader of NxD call it for files that are no zip files.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rankless.errors import CorruptCheckpointError
from rankless.formats.pickles.unpickle import unpickle_sequence
from rankless.formats.pickles.unpickler import TruncatedPickleError
from rankless.formats.torchfile.allowed_globals import NAMES
from rankless.formats.torchfile.archive import ArchiveTree, parse_storage_id
from rankless.formats.torchfile.torch_placeholders import TorchStorage
from rankless.formats.torchfile.zip_reader import FileWindow
from rankless.ondisk.block_crcs import crc64
from rankless.ondisk.read_budget import ReadBudget

#: The first bytes of such a file: a pickle of torch's magic number.
MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."

#: The number of pickles: magic number, protocol, system information, tree, keys of the storages.
_PICKLES = 5

#: How many bytes are read at first to parse the pickles, and at most.
_FIRST, _LIMIT = 2**20, 2**30

_SIZE = struct.Struct("<q")


def read_legacy_archive(window: FileWindow, budget: ReadBudget, names: Mapping[str, object] = NAMES) -> ArchiveTree:
    """Return the tree in a file of the old format. Its pickles may name the globals ``names``.

    The bytes of the pickles are added to ``budget``, and reading them is charged to it. Raises
    ``CorruptCheckpointError`` or ``UnsafePickleError``.
    """
    size = _FIRST
    while True:  # the size of the pickles is unknown until they have been parsed
        raw = window.read(0, min(size, window.size))
        attempt_budget = ReadBudget(len(raw), least=0)
        attempt_budget.left += budget.left
        try:
            tree = _parse_pickles(raw, window, attempt_budget, names)
        except TruncatedPickleError:
            if size >= min(window.size, _LIMIT):
                raise
            size *= 8
            continue
        budget.earn(tree.nbytes)
        budget.spend(attempt_budget.spent)
        return tree


def _parse_pickles(raw: bytes, window: FileWindow, budget: ReadBudget, names: Mapping[str, object]) -> ArchiveTree:
    storages: dict[str, TorchStorage] = {}
    offsets: dict[str, int] = {}
    load_storage = _storage_loader(storages, offsets, window)
    (_, _, system, root, keys), end = unpickle_sequence(
        raw, _PICKLES, names, window.label, load_storage, budget=budget, advice=window.advice
    )
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise CorruptCheckpointError(f"{window.label} was written on a big-endian machine, or is corrupt")
    if not isinstance(keys, list) or not all(isinstance(key, str | int) for key in keys):
        raise CorruptCheckpointError(f"{window.label} is corrupt: the keys of its storages are not a list of names")
    at = end
    for key in keys:
        storage = storages.get(str(key))
        (number,) = _SIZE.unpack(window.read(at, _SIZE.size))
        if storage is None or number * storage.width != storage.nbytes:
            raise CorruptCheckpointError(
                f"{window.label} is corrupt: its storage {str(key)[:40]!r} has another size than its pickle says"
            )
        offsets[str(key)] = at + _SIZE.size
        at += _SIZE.size + storage.nbytes
    if at > window.size or offsets.keys() != storages.keys():
        raise CorruptCheckpointError(f"{window.label} is corrupt or truncated: it ends inside its storages")
    return ArchiveTree(root, end, crc64(raw[:end]))


def _storage_loader(
    storages: dict[str, TorchStorage], offsets: Mapping[str, int], window: FileWindow
) -> Callable[[Any], TorchStorage]:
    """Return a function that returns the storage for a persistent id, and adds it to ``storages``."""

    def load_storage(persistent_id: Any) -> TorchStorage:
        dtype, key, size = parse_storage_id(persistent_id)
        if len(persistent_id) > 5 and persistent_id[5] is not None:  # noqa: PLR2004 - as torch had it
            raise TypeError("it has views of storages, which no torch has written since 2017")
        return storages.setdefault(key, TorchStorage(dtype, size, window, partial(offsets.__getitem__, key)))

    return load_storage
