"""The base of an incremental save: the checkpoint that this process saved or loaded last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from rankless.engine.io.tensor_bytes import TensorVersion
from rankless.errors import RanklessError
from rankless.formats.native import read_manifest
from rankless.ondisk.manifest import FileRecord, Manifest
from rankless.storage.links_and_clones import FileIdentity, Sharing, identify_file

#: The versions of tensors by group and name.
TensorVersions = Mapping[tuple[str, str], TensorVersion]


class BaseFile(NamedTuple):
    """A tensor file of the base: which file it is, and what the manifest says about it."""

    identity: FileIdentity
    record: FileRecord


class BaseCheckpoint(msgspec.Struct, frozen=True):
    """The checkpoint with this ``id`` in the directory ``path``.

    ``files`` are, on rank 0, its tensor files by their paths inside the checkpoint, and ``sequence`` is its number.
    ``versions`` are those of this rank's frozen parameters when the checkpoint was saved.
    """

    path: Path
    id: str
    sequence: int = 0
    files: Mapping[str, BaseFile] = msgspec.field(default_factory=dict)
    versions: TensorVersions = msgspec.field(default_factory=dict)

    def is_full_due(self, sequence: int, keep_full_every: int) -> bool:
        """Return whether the checkpoint number ``sequence`` must share nothing with this one.

        Of all checkpoints of a run directory, those with a multiple of ``keep_full_every`` as number are full.
        """
        return sequence // keep_full_every != self.sequence // keep_full_every


class KnownRun(msgspec.Struct):
    """The knowledge of this process about a run that it writes into.

    ``checkpoint`` is the base of the next save, if there is one. ``sharing`` is what is known about the file system,
    and ``has_checked_store`` whether an object store was asked if it honours conditions.
    """

    checkpoint: BaseCheckpoint | None = None
    sharing: Sharing = msgspec.field(default_factory=Sharing)
    has_checked_store: bool = False


def identify_files(folder: Path, manifest: Manifest) -> dict[str, BaseFile]:
    """Return the tensor files of a checkpoint in ``folder``."""
    return dict(_iter_files(folder, manifest))


def _iter_files(folder: Path, manifest: Manifest) -> Iterator[tuple[str, BaseFile]]:
    for name, record in manifest.files.items():
        identity = identify_file(folder / name) if record.header_size else None
        if identity is not None and identity.size == record.size:
            yield name, BaseFile(identity, record)


def loaded_base(path: Path, identity: str, *, is_coordinator: bool) -> BaseCheckpoint | None:
    """Return the checkpoint that was loaded from ``path`` as a base; ``None`` if it is not there any more."""
    if not is_coordinator:
        return BaseCheckpoint(path, identity)
    with suppress(RanklessError):
        manifest = read_manifest(path)
        if manifest.id == identity:
            return BaseCheckpoint(path, identity, manifest.sequence, identify_files(path, manifest))
    return None
