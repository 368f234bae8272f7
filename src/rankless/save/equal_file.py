"""A hard link of a file of a checkpoint as a file of another one, if both have the same header, and so the same bytes.

Incremental saves (:mod:`rankless.save.base_files`) and edits (:mod:`rankless.conversion.equal_files`) call it on rank
0, before the other files are created. It imports no torch, because conversions need none.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rankless.errors import CorruptCheckpointError, FormatError, StorageError
from rankless.formats.safetensors import SafetensorsFile
from rankless.ondisk import block_crcs
from rankless.ondisk.data_files import DataFile
from rankless.ondisk.manifest import FileRecord
from rankless.storage import posix
from rankless.storage.links_and_clones import FileIdentity, Sharing


class StoredFile(NamedTuple):
    """A file of a checkpoint: its path, its identity, and its record in the manifest."""

    path: Path
    identity: FileIdentity
    record: FileRecord


def link_equal_file(
    stored: StoredFile, folder: Path, file: DataFile, sharing: Sharing
) -> Mapping[str, list[int]] | None:
    """Link a stored file as the planned ``file`` of a new checkpoint in ``folder``, if it has the header of that.

    Return the CRCs of the blocks of its tensors, by name. Return ``None``, and leave nothing, if it has another layout,
    is not the file with the identity any more, or cannot be linked.
    """
    if stored.identity.size != file.size:
        return None
    target = folder / file.path
    posix.make_parents(folder, file.path)
    if not sharing.link_file(stored.path, target, stored.identity):
        return None
    with suppress(CorruptCheckpointError, FormatError, StorageError):  # of a header that cannot be read: no link
        crcs = SafetensorsFile.open(target, stored.record).crcs
        header = file.build_header(itertools.chain(*(crcs.get(name, []) for name in file.entries)))
        if f"{block_crcs.crc64(header):016x}" == stored.record.header_crc64nvme:
            return crcs
    posix.remove_file(target)
    return None
