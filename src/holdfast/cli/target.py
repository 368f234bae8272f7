"""What a command's argument means: a checkpoint of any format, or a run's folder and so its checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.catalog import list_checkpoints, open_latest
from holdfast.cli.described import Describing
from holdfast.errors import DamagedError
from holdfast.formats.detect import is_checkpoint
from holdfast.formats.indexed.inspect import inspect
from holdfast.formats.native import NativeReader
from holdfast.formats.reader import Reader, Values, as_opened
from holdfast.layout.files import TensorInfo
from holdfast.layout.manifest import Manifest
from holdfast.storage import local
from holdfast.survey import CheckpointInfo


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

    def describing(self, group: str) -> Describing:
        """Puts descriptions in the place of the tensors of a group, which are inside of values."""
        return Describing(self.reader.groups.get(group, {}))

    def values(self) -> Values:
        """Its values, with those of the first rank. Raises ``DamagedError``, or ``GoneError`` where it was replaced."""
        with as_opened(self.reader):
            return self.reader.values(0, self.describing("state"), self.describing("ranks"))


def _natural(name: str) -> list[str | int]:
    return [int(part) if i % 2 else part for i, part in enumerate(re.split("([0-9]{1,18})", name))]


def checkpoints(path: Path) -> list[CheckpointInfo]:
    """The checkpoints that a run's folder has; none where the path is a checkpoint itself, or no folder."""
    return [] if is_checkpoint(path) else list_checkpoints(path)


def load(path: Path) -> Target:
    """Read the metadata of a checkpoint, or of a run's latest; no tensors, and without torch.

    Raises ``NoCheckpointError``, ``FormatError`` or ``DamagedError``.
    """
    found = checkpoints(path)
    if found and found[-1].status != "complete":
        raise DamagedError(f"none of the {len(found)} checkpoint(s) in {path} can be read: {found[-1].problem}")
    noticed = inspect(path)
    if noticed.faults:
        raise DamagedError("\n".join(noticed.faults))
    reader = open_latest(path)
    manifest = reader.manifest if isinstance(reader, NativeReader) else None
    return Target(reader.path, reader, manifest, noticed.notes)
