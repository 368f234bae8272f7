"""The checkpoints of a run's folder: which there are, which is the latest, what the next one is numbered."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.errors import CheckpointReplacedError, InvalidArgumentError, NoCheckpointError
from holdfast.formats.detect import describe_contents, is_checkpoint, open_reader
from holdfast.formats.native import NativeReader, is_native
from holdfast.formats.reader import Reader
from holdfast.ondisk.hidden_names import parse_hidden_name
from holdfast.ondisk.manifest import LARGEST
from holdfast.ondisk.validation import check_tag
from holdfast.run.scan import (
    CheckpointInfo,
    displaced_checkpoint,
    is_own_checkpoint,
    read_info,
    read_info_strictly,
    scan_run,
)
from holdfast.storage import posix

#: How often another checkpoint is tried where the latest one goes.
_ATTEMPTS = 100


def list_checkpoints(path: Path) -> list[CheckpointInfo]:
    """The checkpoints in a run's folder, oldest first; those that cannot be read come before all others.

    They are the caller's own.
    """
    return [replace(info, metrics=dict(info.metrics)) for info in cached_checkpoints(path)]


def cached_checkpoints(path: Path) -> list[CheckpointInfo]:
    """The same for those who only look at them."""
    return scan_run(path, read_info)


def list_checkpoints_strictly(path: Path) -> list[CheckpointInfo]:
    """The same for those who ask which is the latest: nobody can tell while the file system refuses any of them.

    Raises ``StorageError`` then.
    """
    return scan_run(path, read_info_strictly)


def latest_checkpoint(path: Path) -> CheckpointInfo:
    """The latest complete checkpoint. Raises ``NoCheckpointError``."""
    found = cached_checkpoints(path)
    complete = [info for info in found if info.status == "complete"]
    if complete:
        return complete[-1]
    if found:
        raise NoCheckpointError(f"none of the {len(found)} checkpoint(s) in {path} can be read: {found[-1].problem}")
    raise NoCheckpointError(f"there is no checkpoint in {path}{describe_contents(path)}")


def is_run_directory(path: Path) -> bool:
    """Whether a folder holds checkpoints of ours. It is a run's folder then, whatever else is in it."""
    return any(map(is_own_checkpoint, cached_checkpoints(path)))


def describe_ignored_files(path: Path) -> str | None:
    """Say which files of a run's folder could be taken for what the folder holds; ``None`` if there is none."""
    if not is_checkpoint(path):
        return None
    ignored = [file.name for file in posix.list_files(path) if is_checkpoint(file)]
    if not ignored:
        return None
    names = ", ".join(ignored)
    return f"{path} holds checkpoints of holdfast: {names} beside them is ignored; to read it, pass its path"


def open_latest(path: Path, keys: Mapping[str, str] | None = None) -> Reader:
    """A reader for a checkpoint, or for the latest of a run's folder; where that goes meanwhile, for the next one.

    ``keys`` are those of :func:`holdfast.formats.detect.open_reader`, which says what is raised.
    """
    for _ in range(_ATTEMPTS):
        place = resolve_checkpoint_path(path)
        with suppress(CheckpointReplacedError):
            if is_run_directory(path) or (posix.is_directory(place) and not is_checkpoint(place)):
                return NativeReader(latest_checkpoint(path).path)
            return open_reader(place, keys)
    raise CheckpointReplacedError(f"the checkpoints in {path} are replaced or removed faster than one can be opened")


def resolve_checkpoint_path(path: Path) -> Path:
    """Where a checkpoint is that is called by its path: there, or put aside for one that has not got its name yet."""
    if posix.path_exists(path):
        return path
    aside = (
        path.parent / hidden.name
        for hidden in displaced_checkpoint(posix.list_names(path.parent))
        if hidden.tag == path.name
    )
    return next(aside, path)


def checkpoint_path(path: Path, tag: str) -> Path:
    """The path of a run's checkpoint by its tag: of ours, or one of any format that lies in the folder.

    Raises ``NoCheckpointError`` naming those that there are, or ``InvalidArgumentError`` if the tag cannot be one, or
    the path is itself a checkpoint and no run.
    """
    place = path / check_tag(tag)
    if is_native(place) or (not is_native(path) and is_checkpoint(place)):
        return place
    if is_checkpoint(path) and not list_checkpoints(path):
        raise InvalidArgumentError(f"{path} is a checkpoint itself, not the folder of a run: leave out the tag {tag!r}")
    return find_checkpoint(path, tag)


def find_checkpoint(path: Path, tag: str) -> Path:
    """The folder of one checkpoint. Raises ``NoCheckpointError`` naming those that there are."""
    if is_native(path / tag):
        return path / tag
    every = cached_checkpoints(path)
    if same := [info.path for info in every if info.tag == tag]:
        return same[-1]
    tags = [info.tag for info in every]
    there = f"there are {', '.join(tags[-5:])}" if tags else "there is none at all"
    raise NoCheckpointError(f"there is no checkpoint {tag!r} in {path}; {there}")


@dataclass(frozen=True, slots=True)
class CheckpointIdentity:
    """What tells the next checkpoint of a run: its sequence, the run's id, an id of its own."""

    sequence: int
    run: str
    id: str


def next_identity(path: Path, runs: frozenset[str]) -> CheckpointIdentity:
    """The next checkpoint in a run's folder, after all that are there.

    It continues the newest of those ``runs`` that it may, by their ids; where none of them is there it begins another.
    Raises ``StorageError`` where the file system does not tell which there are.
    """
    complete = [info for info in list_checkpoints_strictly(path) if info.status == "complete"]
    sequence = min(complete[-1].sequence + 1, LARGEST) if complete else 1
    own = [info.run for info in complete if info.run in runs]
    return CheckpointIdentity(sequence, own[-1] if own else secrets.token_hex(8), secrets.token_hex(8))


@dataclass(frozen=True, slots=True)
class StaleDirectory:
    """What a save or a removal that never ended left behind, or one that is under way: nobody can tell from here.

    ``state`` is ``"partial"``, ``"replaced"``, ``"removed"`` or ``"corrupt"``; ``nbytes`` is what its files take of
    the disk now, ``time`` when its folder last changed.
    """

    name: str
    tag: str
    path: Path
    time: float
    nbytes: int
    state: str = "partial"


def list_stale_directories(run: Path) -> list[StaleDirectory]:
    """The hidden folders of saves and removals that did not end, but for those that are checkpoints still."""
    aside = {hidden.name for hidden in displaced_checkpoint(posix.list_names(run))}
    found = []
    for folder in posix.list_hidden_directories(run):
        hidden = parse_hidden_name(folder.name)
        if hidden is None or folder.name in aside:
            continue
        if usage := posix.disk_usage(folder):  # else it was committed or removed meanwhile
            found.append(StaleDirectory(folder.name, hidden.tag, folder, *usage, hidden.state))
    return found
