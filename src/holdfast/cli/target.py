"""What a command's argument means: a checkpoint of any format, or a run's folder and so its checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.catalog import CheckpointInfo, latest, list_checkpoints
from holdfast.errors import DamagedError
from holdfast.formats.detect import is_checkpoint, open_reader
from holdfast.formats.indexed.inspect import inspect
from holdfast.formats.native import NativeReader
from holdfast.formats.reader import Reader
from holdfast.layout.files import TensorInfo
from holdfast.layout.manifest import Manifest
from holdfast.storage import local


@dataclass(frozen=True)
class Target:
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
        return {file: local.size_of(file) for file in sorted(self.reader.files)}


def _natural(name: str) -> list[str | int]:
    return [int(part) if i % 2 else part for i, part in enumerate(re.split("([0-9]{1,18})", name))]


def checkpoints(path: Path) -> list[CheckpointInfo]:
    """The checkpoints that a run's folder has; none where the path is a checkpoint itself, or no folder."""
    return [] if is_checkpoint(path) else list_checkpoints(path)


def one(path: Path) -> Path:
    """The checkpoint itself, or a run's latest. Raises ``NoCheckpointError``, ``FormatError`` or ``DamagedError``."""
    found = checkpoints(path)
    if found and found[-1].status != "complete":
        raise DamagedError(f"none of the {len(found)} checkpoint(s) in {path} can be read: {found[-1].problem}")
    if path.is_dir() and not is_checkpoint(path):
        return latest(path).path
    if not is_checkpoint(path):
        open_reader(path)  # says what it is instead
    return path


def load(path: Path) -> Target:
    """Read a checkpoint's metadata; no tensors, and without torch. Raises ``FormatError`` and ``DamagedError``, too."""
    found = inspect(path)
    if found.faults:
        raise DamagedError("\n".join(found.faults))
    reader = open_reader(path)
    return Target(path, reader, reader.manifest if isinstance(reader, NativeReader) else None, found.notes)
