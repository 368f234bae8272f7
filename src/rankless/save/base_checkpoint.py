"""The base of an incremental save: the checkpoint that this process saved or loaded last.

In an object store, it is the one that this process has uploaded last.

An output takes the base from :class:`KnownRun` when a save begins, and puts the new checkpoint there after its commit;
:class:`~rankless.run_directory.RunDirectory` puts there the checkpoint that a load has read. Files are known on rank 0
only. A failed save forgets the base, so the next one writes everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from rankless.engine.io.tensor_bytes import TensorVersion
from rankless.errors import RanklessError
from rankless.formats.native import read_manifest
from rankless.ondisk.data_files import DataFile
from rankless.ondisk.manifest import FileRecord, Manifest
from rankless.run.catalog import list_checkpoints
from rankless.run.history import KnownCheckpoint
from rankless.storage.links_and_clones import FileIdentity, Sharing, identify_file
from rankless.storage.object_path import ObjectPath

#: The versions of tensors by group and name.
TensorVersions = Mapping[tuple[str, str], TensorVersion]


class BaseFile(NamedTuple):
    """A tensor file of the base: its identity, and its record in the manifest."""

    identity: FileIdentity
    record: FileRecord


class BaseCheckpoint(msgspec.Struct, frozen=True):
    """The checkpoint with this ``id`` in the directory ``path``.

    ``files`` are, on rank 0, its tensor files by their paths inside the checkpoint, and ``sequence`` is its number.
    ``versions`` are the versions that this rank's frozen parameters had when the checkpoint was saved.
    ``sharing_saves`` counts the saves from the last full one to it, on rank 0; it is ``None`` if it was loaded.
    """

    path: Path
    id: str
    sequence: int = 0
    files: Mapping[str, BaseFile] = msgspec.field(default_factory=dict)
    versions: TensorVersions = msgspec.field(default_factory=dict)
    sharing_saves: int | None = None


class UploadedFile(NamedTuple):
    """A file that was uploaded: its layout, its ETag, its record in the manifest, and its header, which has CRCs."""

    file: DataFile
    etag: str
    record: FileRecord
    header: bytes


class UploadedBase(msgspec.Struct, frozen=True):
    """The checkpoint with this ``id`` and number in the folder ``path`` of an object store.

    ``files`` are, on rank 0, its tensor files by their paths inside the checkpoint. ``versions`` and ``sharing_saves``
    are as in :class:`BaseCheckpoint`.
    """

    path: ObjectPath
    id: str
    sequence: int
    files: Mapping[str, UploadedFile] = msgspec.field(default_factory=dict)
    versions: TensorVersions = msgspec.field(default_factory=dict)
    sharing_saves: int | None = None


class KnownRun(msgspec.Struct):
    """The knowledge of this process about a run that it writes into.

    ``checkpoint`` is the base of the next save, if there is one; ``uploaded`` in an object store. ``sharing`` has the
    known facts about the file system, ``has_checked_store`` says whether an object store was asked if it honours
    conditions, and ``makes_copies`` whether it copies objects, if that is known.
    """

    checkpoint: BaseCheckpoint | None = None
    uploaded: UploadedBase | None = None
    makes_copies: bool | None = None
    sharing: Sharing = msgspec.field(default_factory=Sharing)
    has_checked_store: bool = False


def count_sharing_saves(base: BaseCheckpoint | UploadedBase, keep_full_every: int, sequence: int) -> int:
    """Return how many saves share with the last full one if the one with the number ``sequence`` does; 0 if it is full.

    One of ``keep_full_every`` checkpoints is full. Of a base that was loaded, the numbers tell how many there may be:
    the first checkpoint from each multiple of ``keep_full_every`` on is full, also if that number itself is missing.
    For example, with ``keep_full_every=4``, three saves share after each full one.

    Outputs call it on rank 0 when they begin.
    """
    if base.sharing_saves is None:
        return sequence % keep_full_every if sequence // keep_full_every == base.sequence // keep_full_every else 0
    return (base.sharing_saves + 1) % keep_full_every


def identify_files(folder: Path, manifest: Manifest) -> dict[str, BaseFile]:
    """Return the tensor files of a checkpoint in ``folder``.

    Rank 0 calls it right before the rename of a new checkpoint, and after a load.
    """
    files = {}
    for name, record in manifest.files.items():
        identity = identify_file(folder / name) if record.header_size else None
        if identity is not None and identity.size == record.size:
            files[name] = BaseFile(identity, record)
    return files


def checkpoint_before(run: Path, saved: KnownCheckpoint) -> BaseCheckpoint | None:
    """Return the newest checkpoint of a run directory that was saved before another one of its run, as a base.

    A drain calls it on rank 0: the job that drains has saved nothing. ``None`` if there is none, or it cannot be read.
    """
    with suppress(RanklessError):
        older = [info for info in list_checkpoints(run) if info.run == saved.run and info.sequence < saved.sequence]
        if older:
            return loaded_base(older[-1].path, older[-1].id, is_coordinator=True)
    return None


def loaded_base(path: Path, identity: str, *, is_coordinator: bool) -> BaseCheckpoint | None:
    """Return the checkpoint that was loaded from ``path`` as a base; ``None`` if it is not there any more.

    Each rank calls it for itself after a load, without a vote.
    """
    if not is_coordinator:
        return BaseCheckpoint(path, identity)
    with suppress(RanklessError):
        manifest = read_manifest(path)
        if manifest.id == identity:
            return BaseCheckpoint(path, identity, manifest.sequence, identify_files(path, manifest))
    return None
