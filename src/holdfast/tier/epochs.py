"""Epochs: which generations of the local tier belong to the training as it went on, and which to an abandoned branch.

A host that was disconnected may come back with generations that are newer than the one from which the others continued.
And a user may go back to an older checkpoint on purpose. So each job that uses the tier claims an *epoch* when it loads
or first saves: it creates a file in the run directory that no other job can create, with the sequence number of the
checkpoint from which it continues. A generation is *retired* if a later epoch continued from an older checkpoint.

In the run directory the files are in ``.epochs``. They are small, and one is made at each start of a job.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

import msgspec

from holdfast.errors import CorruptCheckpointError
from holdfast.storage import posix
from holdfast.storage.atomic_rename import create_small
from holdfast.storage.object_path import ObjectPath
from holdfast.storage.store import store_of

#: The folder of the epochs in a run directory.
FOLDER = ".epochs"

_SUFFIX = ".json"


class _Epoch(msgspec.Struct, frozen=True):
    """``start`` is the sequence number of the checkpoint from which the epoch continues; 0 without one.

    ``claim`` differs in all epochs. If the answer of an object store was lost, the bytes tell who has written them.
    """

    start: int
    claim: str = ""


def read_epochs(run: Path) -> Mapping[int, int]:
    """Return the starts of all epochs of a run, by their numbers. Raises ``CorruptCheckpointError`` naming a file."""
    folder = run / FOLDER
    starts = {}
    for name in store_of(run).list_names(folder):
        number = name.removesuffix(_SUFFIX)
        if name.endswith(_SUFFIX) and number.isdecimal():
            try:
                starts[int(number)] = msgspec.json.decode(store_of(folder).read_small(folder / name), type=_Epoch).start
            except msgspec.DecodeError as error:
                raise CorruptCheckpointError(f"{folder / name} is corrupt: {error}; remove it") from error
    return starts


def claim_epoch(run: Path, start: int, above: int = 0) -> int:
    """Claim the next epoch of a run, which continues from the checkpoint with the sequence number ``start``.

    Its number is larger than ``above``: a run directory may have lost its epochs.
    """
    folder, data = run / FOLDER, msgspec.json.encode(_Epoch(start, secrets.token_hex(8)))
    if not isinstance(run, ObjectPath):
        posix.make_durable_directory(folder)
    number = max([above, *read_epochs(run)])
    while True:
        number += 1
        path = folder / f"{number:06d}{_SUFFIX}"
        if _create(path, data):
            return number


def _create(path: Path, data: bytes) -> bool:
    """Create a file or object. Return whether no other process has. A store may ignore that it exists already."""
    if isinstance(path, ObjectPath):
        return path.store.create_object(path, data) and path.store.read_small(path) == data
    return create_small(path, data)


def is_retired(epochs: Mapping[int, int], epoch: int, sequence: int) -> bool:
    """Return whether a later epoch continued from a checkpoint older than a generation."""
    return any(later > epoch and start < sequence for later, start in epochs.items())
