"""What a command's argument means: a checkpoint of any format, or a run's folder and so its checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.placeholders import PlaceholderCodec
from holdfast.errors import CorruptCheckpointError, InvalidArgumentError, NoCheckpointError
from holdfast.formats.detect import is_checkpoint, open_reader
from holdfast.formats.native import NativeReader
from holdfast.formats.reader import CheckpointValues, Reader, detect_replacement
from holdfast.formats.sharded.inspect import inspect_shards
from holdfast.ondisk.files import TensorInfo
from holdfast.ondisk.manifest import Manifest
from holdfast.run.catalog import (
    checkpoint_path,
    describe_ignored_files,
    is_run_directory,
    list_checkpoints,
    open_latest,
    resolve_checkpoint_path,
)
from holdfast.run.scan import CheckpointInfo
from holdfast.storage import posix

#: The option of every command that reads one checkpoint of a run.
Tag = Annotated[
    str | None, typer.Option("--tag", metavar="TAG", help="Of a run: the checkpoint of this tag, not the latest.")
]


@dataclass(frozen=True)
class InspectedCheckpoint:
    """One checkpoint, its metadata read; ``manifest`` where it is one of ours; ``notes`` on what lies beside it."""

    path: Path
    reader: Reader
    manifest: Manifest | None
    notes: tuple[str, ...] = ()

    def entries(self) -> Iterator[tuple[str, str, TensorInfo]]:
        """Group, name and description of every tensor, those inside values included; layer 2 comes before layer 10."""
        for group, infos in sorted(self.reader.groups.items()):
            for name in sorted(infos, key=_natural):
                yield group, name, infos[name]

    @property
    def tensors(self) -> int:
        """How many tensors it has."""
        return sum(1 for _ in self.entries())

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(info.nbytes for _, _, info in self.entries())

    def files(self) -> dict[Path, int]:
        """Its files and their sizes."""
        if self.manifest:
            return {self.path / name: record.size for name, record in self.manifest.files.items()}
        return {file: posix.size_of(file) for file in sorted(self.reader.files)}

    def describing(self, group: str) -> PlaceholderCodec:
        """Puts descriptions in the place of the tensors of a group, which are inside of values."""
        return PlaceholderCodec(self.reader.groups.get(group, {}))

    def values(self) -> CheckpointValues:
        """Its values, with those of the first rank. Raises ``CorruptCheckpointError``, or ``CheckpointReplacedError`` where it was replaced."""
        with detect_replacement(self.reader):
            return self.reader.values(0, self.describing("state"), self.describing("ranks"))


def raise_not_read(reader: Reader) -> list[str]:
    """What there is in a checkpoint that is not among its tensors and values, in words."""
    return [f"{one.group} {one.name}: {one.why}" for one in reader.unread]


def _natural(name: str) -> list[str | int]:
    return [int(part) if i % 2 else part for i, part in enumerate(re.split("([0-9]{1,18})", name))]


def check_run(path: Path) -> None:
    """Check that a path can be a run's folder. Raises ``NoCheckpointError`` or ``InvalidArgumentError``."""
    if is_checkpoint(path) and not list_checkpoints(path):
        raise InvalidArgumentError(f"{path} is a checkpoint itself, not the folder of a run; try holdfast show")
    if not posix.is_directory(path):
        raise NoCheckpointError(f"there is no folder {path}")


def list_targets(path: Path) -> list[CheckpointInfo]:
    """The checkpoints that a run's folder has; none where the path is a checkpoint itself, or no folder."""
    return list_checkpoints(path) if is_run_directory(path) or not is_checkpoint(path) else []


def named_path(path: str, tag: str | None) -> Path:
    """The path that an argument names, or in that run the checkpoint of a tag.

    Raises ``NoCheckpointError`` or ``InvalidArgumentError``.
    """
    place = posix.local_path(path)
    return place if tag is None else checkpoint_path(place, tag)


def inspect_path(path: Path) -> InspectedCheckpoint:
    """Read the metadata of a checkpoint, or of a run's latest; no tensors, and without torch.

    Raises ``NoCheckpointError``, ``FormatError`` or ``CorruptCheckpointError``.
    """
    found = list_targets(path)
    if not found:
        notes = _inspect(path)
        return _target(open_latest(path), notes)
    if found[-1].status != "complete":
        raise CorruptCheckpointError(
            f"none of the {len(found)} checkpoint(s) in {path} can be read: {found[-1].problem}"
        )
    ignored = describe_ignored_files(path)
    return _target(open_latest(path), (ignored,) if ignored else ())


def inspect_exact_path(path: Path) -> InspectedCheckpoint:
    """The same of a checkpoint, also if there are other checkpoints in it."""
    notes = _inspect(path)
    return _target(open_reader(resolve_checkpoint_path(path)), notes)


def _inspect(path: Path) -> tuple[str, ...]:
    noticed = inspect_shards(path)
    if noticed.faults:
        raise CorruptCheckpointError("\n".join(noticed.faults))
    return noticed.notes


def _target(reader: Reader, notes: tuple[str, ...]) -> InspectedCheckpoint:
    manifest = reader.manifest if isinstance(reader, NativeReader) else None
    return InspectedCheckpoint(reader.path, reader, manifest, (*notes, *raise_not_read(reader)))
