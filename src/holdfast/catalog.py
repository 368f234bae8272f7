"""The checkpoints of a run's folder: which there are, which is the latest, what the next one is numbered."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from holdfast.errors import DamagedError, FormatError, HoldfastError, NoCheckpointError, StorageError
from holdfast.formats.native import is_native, read_manifest
from holdfast.layout.hidden import parse
from holdfast.layout.manifest import Manifest
from holdfast.storage import local


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One checkpoint of a run. ``time`` is in seconds since 1970, ``nbytes`` the size of the files its manifest names.

    ``status`` is ``"complete"``, ``"damaged"`` where the manifest is, or ``"unreadable"`` where it is of a newer format
    or may not be read. The other fields are then empty but for ``problem``, which says why.
    """

    tag: str
    path: Path
    status: Literal["complete", "damaged", "unreadable"] = "complete"
    step: float | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    sequence: int = 0
    time: float = 0.0
    nbytes: int = 0
    problem: str = ""
    run: str = ""
    id: str = ""

    @classmethod
    def of(cls, path: Path, manifest: Manifest) -> CheckpointInfo:
        """The checkpoint in a folder, from its manifest. The folder's name is the tag, also after a rename."""
        return cls(
            tag=path.name,
            path=path,
            step=manifest.step,
            metrics=dict(manifest.metrics),
            sequence=manifest.sequence,
            time=manifest.time,
            nbytes=manifest.nbytes,
            run=manifest.run,
            id=manifest.id,
        )

    @property
    def age(self) -> tuple[int, float, str]:
        """Sorts checkpoints from the oldest to the latest; never by a file's time, so that copies stay in order."""
        return self.sequence, self.time, self.id


def list_checkpoints(path: Path) -> list[CheckpointInfo]:
    """The checkpoints in a run's folder, oldest first; those that cannot be read come before all others."""
    return _sorted(_look(folder) for folder in _folders(path))


def every_checkpoint(path: Path) -> list[CheckpointInfo]:
    """The same for those who ask which is the latest: nobody can tell while the file system refuses any of them.

    Raises ``StorageError`` then.
    """
    return _sorted(info for folder in _folders(path) for info in _look_again(folder))


def _sorted(found: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    return sorted(found, key=lambda info: (info.status == "complete", *info.age, info.tag))


def _folders(path: Path) -> list[Path]:
    return [folder for folder in local.subfolders(path) if is_native(folder)]


def _look(folder: Path) -> CheckpointInfo:
    try:
        return _read(folder)
    except StorageError as error:
        return CheckpointInfo(folder.name, folder, "unreadable", problem=_text(error))


def _look_again(folder: Path) -> Iterator[CheckpointInfo]:
    try:
        yield _read(folder)
    except StorageError as error:
        if error.errno != errno.ENOENT:  # it was removed meanwhile
            raise


def _read(folder: Path) -> CheckpointInfo:
    try:
        return CheckpointInfo.of(folder, read_manifest(folder))
    except DamagedError as error:
        return CheckpointInfo(folder.name, folder, "damaged", problem=_text(error))
    except FormatError as error:
        return CheckpointInfo(folder.name, folder, "unreadable", problem=_text(error))


def _text(error: HoldfastError) -> str:
    return str(error.args[-1])


def latest(path: Path) -> CheckpointInfo:
    """The latest complete checkpoint. Raises ``NoCheckpointError``."""
    found = list_checkpoints(path)
    complete = [info for info in found if info.status == "complete"]
    if complete:
        return complete[-1]
    if found:
        raise NoCheckpointError(f"none of the {len(found)} checkpoint(s) in {path} can be read: {found[-1].problem}")
    raise NoCheckpointError(f"there is no checkpoint in {path}")


def find(path: Path, tag: str) -> Path:
    """The folder of one checkpoint. Raises ``NoCheckpointError`` naming those that there are."""
    if is_native(path / tag):
        return path / tag
    tags = [info.tag for info in list_checkpoints(path)]
    there = f"there are {', '.join(tags[-5:])}" if tags else "there is none at all"
    raise NoCheckpointError(f"there is no checkpoint {tag!r} in {path}; {there}")


@dataclass(frozen=True, slots=True)
class Successor:
    """What tells the next checkpoint of a run: its sequence, the run's id, an id of its own."""

    sequence: int
    run: str
    id: str


def successor(path: Path) -> Successor:
    """The next checkpoint of the run in a folder; the first one draws the run's id.

    Raises ``StorageError`` where the file system does not tell which there are.
    """
    complete = [info for info in every_checkpoint(path) if info.status == "complete"]
    last = complete[-1] if complete else None
    return Successor(last.sequence + 1 if last else 1, last.run if last else secrets.token_hex(8), secrets.token_hex(8))


@dataclass(frozen=True, slots=True)
class Leftover:
    """What a save or a removal that never ended left behind, or one that is under way: nobody can tell from here.

    ``state`` is ``"partial"``, ``"replaced"`` or ``"removed"``; ``nbytes`` is what its files take of the disk now,
    ``time`` when its folder last changed.
    """

    name: str
    tag: str
    path: Path
    time: float
    nbytes: int
    state: str = "partial"


def leftovers(run: Path) -> list[Leftover]:
    """The hidden folders of saves and removals that did not end."""
    found = []
    for folder in local.hidden_folders(run):
        hidden = parse(folder.name)
        with suppress(FileNotFoundError):  # it was committed or removed meanwhile
            if hidden is not None:
                changed = folder.stat().st_mtime
                found.append(Leftover(folder.name, hidden.tag, folder, changed, _used(folder), hidden.state))
    return found


def _used(folder: Path) -> int:
    return sum(file.lstat().st_blocks * 512 for file in folder.rglob("*"))
