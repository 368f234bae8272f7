"""torch's hash of the entry names in a ``torch.save`` file with a given number of storages, computed by torch.

The writers of NxD's files ask it, in the process that writes: rank 0 of a conversion, or the converter of ZeRO states.
"""

from __future__ import annotations

import io
import zipfile

import torch

from rankless.formats.torchfile.zip_frame import NAMES

#: The number of digits of the hash, and the entry that contains it.
_DIGITS, _ENTRY = 20, "archive/.data/serialization_id"


def names_hash(storages: int) -> int:
    """Return the hash. No reader checks it; it makes files byte-identical to those that torch writes."""
    if storages in NAMES:
        return NAMES[storages]
    file = io.BytesIO()
    torch.save([torch.empty(0) for _ in range(storages)], file)
    with zipfile.ZipFile(file) as archive:
        return int(archive.read(_ENTRY)[:_DIGITS])
