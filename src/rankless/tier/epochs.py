"""Epochs: which generations of the local tier belong to the training as it went on, and which to an abandoned branch.

A host that was disconnected may come back with generations that are newer than the one from which the others continued.
And a user may go back to an older checkpoint on purpose. So each job that uses the tier has an *epoch*:

1. When it begins to load, or at its first save, it reserves a number: it creates a file in the run directory that no
   other job can create. The reservation orders jobs: from then on, one with a lower number drains nothing, takes over
   no folder, and begins no epoch. So a job that was stopped while another one went on changes nothing when it wakes up.
2. When it has loaded, it begins its epoch: it creates another file, with the sequence number of the checkpoint from
   which it continues. A later job creates this file, too, but without a number, if it is not there yet: one of both
   succeeds. A generation is *retired* if a later epoch continued from an older checkpoint.

In the run directory the files are in ``.epochs``, or the objects below this key. They are small, and two are made at
each start of a job.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from pathlib import Path

import msgspec

from rankless.errors import CorruptCheckpointError
from rankless.storage import posix
from rankless.storage.atomic_rename import create_small
from rankless.storage.object_path import ObjectPath
from rankless.storage.store import store_of

#: The folder of the epochs in a run directory.
FOLDER = ".epochs"

_SUFFIX, _RESERVED = ".json", ".reserved"

#: A folder of a tier knows its job by a text that begins with the job's epoch.
_JOB = re.compile(r"(?P<epoch>\d{8})-[0-9a-f]+")


class _Epoch(msgspec.Struct, frozen=True):
    """``start`` is the sequence number of the checkpoint from which the epoch continues; 0 without one.

    It is ``None`` for an epoch that must not begin any more. ``claim`` differs in all epochs: if the answer of an
    object store was lost, the bytes tell who has written them.
    """

    start: int | None
    claim: str = ""


def read_epochs(run: Path) -> Mapping[int, int]:
    """Return the starts of the epochs of a run that began, by their numbers.

    Raises ``CorruptCheckpointError`` naming a file.
    """
    folder = run / FOLDER
    starts = {}
    for number in _list_numbers(run, _SUFFIX):
        path = _path_of(run, number, _SUFFIX)
        try:
            start = msgspec.json.decode(store_of(folder).read_small(path), type=_Epoch).start
        except msgspec.DecodeError as error:
            raise CorruptCheckpointError(f"{path} is corrupt: {error}; remove it") from error
        if start is not None:
            starts[number] = start
    return starts


def find_newest_epoch(run: Path) -> int:
    """Return the largest number that a job of a run has reserved; 0 if none has."""
    return max(_list_numbers(run, _SUFFIX, _RESERVED), default=0)


def reserve_epoch(run: Path, above: int = 0) -> int:
    """Reserve the next epoch of a run. Its number is larger than ``above``: a run directory may have lost its epochs.

    Epochs with lower numbers that have not begun never will.
    """
    if not isinstance(run, ObjectPath):
        posix.make_durable_directory(run / FOLDER)
    number = max(above, find_newest_epoch(run))
    while True:
        number += 1
        if _create(_path_of(run, number, _RESERVED), secrets.token_hex(8).encode()):
            break
    for older in _list_numbers(run, _RESERVED) - _list_numbers(run, _SUFFIX):
        if older < number:
            _create(_path_of(run, older, _SUFFIX), _encode_epoch(None))
    return number


def begin_epoch(run: Path, number: int, start: int) -> bool:
    """Begin a reserved epoch, which continues from the checkpoint with the sequence number ``start``.

    Return whether it has begun: not if another job has reserved a later epoch.
    """
    return _create(_path_of(run, number, _SUFFIX), _encode_epoch(start))


def _list_numbers(run: Path, *suffixes: str) -> set[int]:
    stems = (name.removesuffix(end) for name in store_of(run).list_names(run / FOLDER) for end in suffixes)
    return {int(stem) for stem in stems if stem.isdecimal()}


def _path_of(run: Path, number: int, suffix: str) -> Path:
    return run / FOLDER / f"{number:06d}{suffix}"


def _encode_epoch(start: int | None) -> bytes:
    return msgspec.json.encode(_Epoch(start, secrets.token_hex(8)))


def _create(path: Path, data: bytes) -> bool:
    """Create a file or object. Return whether no other process has. A store may ignore that it exists already."""
    if isinstance(path, ObjectPath):
        return path.store.create_object(path, data) and path.store.read_small(path) == data
    return create_small(path, data)


def name_job(epoch: int, token: str) -> str:
    """Return the text by which folders know a job: its epoch, and random digits."""
    return f"{epoch:08d}-{token}"


def parse_job_epoch(job: str) -> int:
    """Return the epoch of a job from its text; 0 if it is none."""
    match = _JOB.fullmatch(job)
    return 0 if match is None else int(match["epoch"])


def is_retired(epochs: Mapping[int, int], epoch: int, sequence: int) -> bool:
    """Return whether a later epoch continued from a checkpoint older than a generation."""
    return any(later > epoch and start < sequence for later, start in epochs.items())
