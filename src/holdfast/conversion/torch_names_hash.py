"""torch's hash of the names of entries in a file of so many storages, asked of torch itself."""

from __future__ import annotations

import io
import zipfile

import torch

from holdfast.formats.torchfile.zip_writer import NAMES

#: Digits of the hash, in the entry that has it.
_DIGITS, _ENTRY = 20, "archive/.data/serialization_id"


def names_hash(storages: int) -> int:
    """Its value, which goes into a fingerprint that nothing checks: files are so equal to torch's own."""
    if storages in NAMES:
        return NAMES[storages]
    file = io.BytesIO()
    torch.save([torch.empty(0) for _ in range(storages)], file)
    with zipfile.ZipFile(file) as found:
        return int(found.read(_ENTRY)[:_DIGITS])
