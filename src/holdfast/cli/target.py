"""What a command's argument means: a checkpoint of any format, or a run's folder and so its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from holdfast.catalog import CheckpointInfo, latest, list_checkpoints
from holdfast.errors import DamagedError, InvalidArgumentError
from holdfast.formats.detect import is_checkpoint, open_reader
from holdfast.formats.native import NativeReader
from holdfast.formats.reader import Reader
from holdfast.layout.manifest import Manifest


@dataclass(frozen=True)
class Target:
    """One checkpoint, its metadata read; ``manifest`` where it is one of ours."""

    path: Path
    reader: Reader
    manifest: Manifest | None

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(info.nbytes for infos in self.reader.groups.values() for info in infos.values())

    @property
    def tensors(self) -> int:
        """How many tensors it has, those inside values included."""
        return sum(len(infos) for infos in self.reader.groups.values())


def place(argument: str) -> Path:
    """The absolute path of an argument. Raises ``InvalidArgumentError`` for an address of an object store."""
    if "://" in argument:
        raise InvalidArgumentError(f"{argument} is not a path of a file system; object stores are not supported yet")
    return Path(argument).absolute()


def checkpoints(path: Path) -> list[CheckpointInfo]:
    """The checkpoints that a run's folder has; none where the path is a checkpoint itself, or not a folder."""
    return [] if is_checkpoint(path) else list_checkpoints(path)


def one(path: Path) -> Path:
    """The checkpoint itself, or a run's latest. Raises ``NoCheckpointError``, ``FormatError`` or ``DamagedError``."""
    found = checkpoints(path)
    if found and found[-1].status == "damaged":
        raise DamagedError(f"none of the {len(found)} checkpoint(s) in {path} can be read: {found[-1].problem}")
    return latest(path).path if path.is_dir() and not is_checkpoint(path) else path


def load(path: Path) -> Target:
    """Read a checkpoint's metadata; no tensors, and no torch."""
    reader = open_reader(path)
    return Target(path, reader, reader.manifest if isinstance(reader, NativeReader) else None)
