"""Statistics that are kept in the folder of a checkpoint, in a hidden file that is no part of the format.

The file is ``.statistics``: a CRC-64/NVME, in 8 bytes, of the rest, which is MessagePack. It names the id of the
checkpoint, so one that was written for another checkpoint of the same path is never taken for this one's. A checkpoint
is complete without it.

:mod:`rankless.inspection.background_statistics` writes it on rank 0, after the commit; ``rankless stats``, reports and
:func:`rankless.read_statistics` read it. The form of the file is stored: files of other versions must be ignored.
"""

from __future__ import annotations

import errno
from os import PathLike

import msgspec

from rankless.errors import CorruptCheckpointError, StorageError
from rankless.inspection.checkpoint_statistics import CheckpointStatistics, select_tensors
from rankless.inspection.inspected_checkpoint import InspectedCheckpoint, inspect_path
from rankless.inspection.tensor_statistics import BUCKETS, TensorStatistics
from rankless.observe.warning import warn_caller
from rankless.ondisk.block_crcs import crc64
from rankless.ondisk.hidden_names import STATISTICS
from rankless.process.prepared_types import prepared
from rankless.storage.location import parse_location
from rankless.storage.store import store_of

#: The number of bytes of the CRC, and the most bytes of a file.
_CRC_BYTES, _MAX_BYTES = 8, 2**30


@prepared
class _KeptStatistics(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file: the id of the checkpoint, and the statistics of each tensor by its name."""

    id: str
    tensors: dict[str, TensorStatistics]


def read_statistics(path: str | PathLike[str]) -> CheckpointStatistics | None:
    """Return the statistics that are kept with a checkpoint, without reading tensors.

    A save with ``stats=True`` keeps them. A file that is corrupt is ignored with a warning, and one of another
    checkpoint without.

    Args:
        path: A checkpoint, or a run directory for its latest one.

    Returns:
        The statistics of each tensor; ``None`` if there are none.

    Raises:
        NoCheckpointError: There is no checkpoint at the path.
        FormatError: The format is not supported.
        CorruptCheckpointError: The metadata of the checkpoint is corrupt.
    """
    return find_statistics(inspect_path(parse_location(path)))


def find_statistics(inspected: InspectedCheckpoint) -> CheckpointStatistics | None:
    """Return the statistics that are kept with a checkpoint; ``None`` if there are none that can be used."""
    if inspected.manifest is None:
        return None
    try:
        kept = _read_file(inspected)
    except (CorruptCheckpointError, StorageError) as error:
        warn_caller(f"the statistics that are kept with {inspected.path} are ignored: {error}")
        return None
    if kept is None or kept.id != inspected.manifest.id:
        return None
    return CheckpointStatistics(inspected.path, kept.tensors)


def write_statistics(inspected: InspectedCheckpoint, statistics: CheckpointStatistics) -> None:
    """Keep statistics with their checkpoint, unless it was replaced or removed. Raises ``StorageError``.

    The thread of :mod:`rankless.inspection.background_statistics` calls it, on rank 0.
    """
    if inspected.manifest is None or not inspected.reader.is_current():
        return
    body = msgspec.msgpack.encode(_KeptStatistics(inspected.manifest.id, dict(statistics.tensors)))
    file = inspected.path / STATISTICS
    try:
        store_of(file).replace_small(file, crc64(body).to_bytes(_CRC_BYTES, "little") + body)
    except StorageError:
        if inspected.reader.is_current():
            raise
        return
    if not inspected.reader.is_current():  # an object store has no folder that was removed before
        store_of(file).remove_file(file)


def _read_file(inspected: InspectedCheckpoint) -> _KeptStatistics | None:
    """Return the content of the file; ``None`` if there is none."""
    file = inspected.path / STATISTICS
    store = store_of(file)
    try:
        if not store.file_exists(file):
            return None
        store.check_regular(file, within=(inspected.path,))
        data = store.read_small(file, _MAX_BYTES)
    except StorageError as error:
        if error.errno == errno.ENOENT:
            return None
        raise
    return _decode(inspected, data)


def _decode(inspected: InspectedCheckpoint, data: bytes) -> _KeptStatistics:
    crc, body = int.from_bytes(data[:_CRC_BYTES], "little"), data[_CRC_BYTES:]
    try:
        if crc64(body) != crc:
            raise CorruptCheckpointError(f"{inspected.path / STATISTICS} does not match its CRC: remove it")
        kept = msgspec.msgpack.decode(body, type=_KeptStatistics)
    except msgspec.DecodeError as error:
        raise CorruptCheckpointError(f"{inspected.path / STATISTICS} is corrupt: remove it") from error
    if inspected.manifest is not None and kept.id == inspected.manifest.id:
        names = {f"{group}/{name}" for group, name in select_tensors(inspected, None)}
        if kept.tensors.keys() != names or any(len(of.histogram) != BUCKETS for of in kept.tensors.values()):
            raise CorruptCheckpointError(f"{inspected.path / STATISTICS} does not fit to the checkpoint: remove it")
    return kept
