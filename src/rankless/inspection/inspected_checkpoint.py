"""A checkpoint of any format with its metadata, which was read, and without its tensors.

Commands, reports and statistics open checkpoints with it, in one process. It must not read tensors: a checkpoint may be
larger than the memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rankless.errors import (
    CheckpointReplacedError,
    CorruptCheckpointError,
    FormatError,
    StorageError,
)
from rankless.formats.detect import is_checkpoint
from rankless.formats.native import NativeReader
from rankless.formats.reader import CheckpointValues, Reader, describe_doubts, detect_replacement
from rankless.formats.sharded.find_shard_faults import inspect_shards
from rankless.inspection.placeholders import PlaceholderCodec
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.manifest import NAME, Manifest
from rankless.run.added_metrics import read_metrics_of
from rankless.run.catalog import is_run_directory, list_checkpoints
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.folder_names import is_called
from rankless.run.lookup import describe_ignored_files, open_at, open_latest, resolve_checkpoint_path
from rankless.run.run_store import tag_of
from rankless.storage.file_memo import sign_file
from rankless.storage.filesystem_kind import forget_names
from rankless.storage.store import store_of

#: Groups of tensors that are inside values.
VALUE_GROUPS = frozenset({"state", "ranks"})


@dataclass(frozen=True)
class InspectedCheckpoint:
    """A checkpoint with metadata that was read.

    ``manifest`` is a rankless checkpoint's manifest. ``notes`` are about files that do not belong to it, and tensors
    that cannot be read.
    """

    path: Path
    reader: Reader
    manifest: Manifest | None
    notes: tuple[str, ...] = ()

    def iterate_tensors(self) -> Iterator[tuple[str, str, TensorInfo]]:
        """Iterate over group, name and description of all tensors, also inside values. Layer 2 is before layer 10."""
        for group, infos in sorted(self.reader.groups.items()):
            for name in sorted(infos, key=_natural_key):
                yield group, name, infos[name]

    @property
    def tensor_count(self) -> int:
        """The number of tensors."""
        return sum(map(len, self.reader.groups.values()))

    @property
    def nbytes(self) -> int:
        """The size of all tensors in bytes."""
        return sum(info.nbytes for infos in self.reader.groups.values() for info in infos.values())

    @property
    def metrics(self) -> dict[str, float | None]:
        """The metrics by name, with those that were added after the save."""
        if self.manifest is None:
            return {}
        saved_as, incarnation = self.manifest.tag, self.manifest.incarnation
        is_ours = partial(is_called, tag=tag_of(self.path), saved_as=saved_as, incarnation=incarnation)
        return {**self.manifest.metrics, **read_metrics_of(self.path.parent, self.manifest.id, is_ours)}

    def file_sizes(self) -> dict[Path, int]:
        """Return the size of each file in bytes."""
        if self.manifest:
            return {self.path / name: record.size for name, record in self.manifest.files.items()}
        return {file: store_of(file).file_size(file) for file in sorted(self.reader.files)}

    def placeholder_codec(self, group: str) -> PlaceholderCodec:
        """Return a codec that replaces the tensors of a group, which are inside values, by placeholders."""
        return PlaceholderCodec(self.reader.groups.get(group, {}))

    def read_values(self) -> CheckpointValues:
        """Return the values, and of the ranks' own values the first rank's.

        Raises ``CorruptCheckpointError``, or ``CheckpointReplacedError`` if the checkpoint was replaced meanwhile.
        """
        with detect_replacement(self.reader):
            return self.reader.read_values(0, self.placeholder_codec("state"), self.placeholder_codec("ranks"))


def describe_unread(reader: Reader) -> list[str]:
    """Return a message for each entry of a checkpoint that cannot be read."""
    return [f"{entry.group} {entry.name}: {entry.why}" for entry in reader.unread]


def _natural_key(name: str) -> list[str | int]:
    return [int(part) if i % 2 else part for i, part in enumerate(re.split("([0-9]{1,18})", name))]


def list_targets(path: Path) -> list[CheckpointInfo]:
    """Return the checkpoints in a run's folder; none if the path is a checkpoint itself, or not a folder."""
    return list_checkpoints(path) if is_run_directory(path) or not is_checkpoint(path) else []


def inspect_path(path: Path) -> InspectedCheckpoint:
    """Read the metadata of a checkpoint, or of the latest checkpoint of a run, without reading tensors.

    Raises ``NoCheckpointError``, ``FormatError`` or ``CorruptCheckpointError``.
    """
    checkpoints = list_targets(path)
    if not checkpoints:
        notes = _inspect_files(path)
        return _make_inspected(open_latest(path), notes)
    if checkpoints[-1].status != "complete":
        raise CorruptCheckpointError(
            f"none of the {len(checkpoints)} checkpoint(s) in {path} can be read: {checkpoints[-1].problem}"
        )
    ignored = describe_ignored_files(path)
    return _make_inspected(open_latest(path), (ignored,) if ignored else ())


def inspect_exact_path(path: Path) -> InspectedCheckpoint:
    """Read the metadata of a checkpoint, also if its folder contains other checkpoints.

    Raises the errors of :func:`inspect_path`, and ``CheckpointReplacedError``.
    """
    with _detect_removal(path):
        notes = _inspect_files(path)
        return _make_inspected(open_at(resolve_checkpoint_path(path)), notes)


@contextmanager
def _detect_removal(path: Path) -> Iterator[None]:
    """Raise ``CheckpointReplacedError`` if files cannot be read because a rankless checkpoint was replaced or removed.

    A client of a network file system lists a directory that it remembers, but its server no longer has.
    """
    manifest = str(path / NAME)
    signature = sign_file(manifest)
    try:
        yield
    except (CorruptCheckpointError, FormatError, StorageError) as error:
        forget_names(path.parent)
        if sign_file(manifest) == signature:
            raise
        raise CheckpointReplacedError(f"{path} was replaced or removed while it was read") from error


def _inspect_files(path: Path) -> tuple[str, ...]:
    if store_of(path).is_remote:  # files of other systems are not read there
        return ()
    inspection = inspect_shards(path)
    if inspection.faults:
        raise CorruptCheckpointError("\n".join(inspection.faults))
    return inspection.notes


def _make_inspected(reader: Reader, notes: tuple[str, ...]) -> InspectedCheckpoint:
    manifest = reader.manifest if isinstance(reader, NativeReader) else None
    return InspectedCheckpoint(
        reader.path, reader, manifest, (*notes, *describe_doubts(reader), *describe_unread(reader))
    )
