"""The checkpoints of a run's folder: which there are, which is the latest, what the next one is numbered."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.errors import GoneError, InvalidArgumentError, NoCheckpointError
from holdfast.formats.detect import is_checkpoint, open_reader, said_of
from holdfast.formats.native import NativeReader, is_native
from holdfast.formats.reader import Reader
from holdfast.layout.hidden import parse
from holdfast.layout.manifest import LARGEST
from holdfast.layout.names import check_tag
from holdfast.storage import local
from holdfast.survey import CheckpointInfo, is_ours, look, look_strictly, put_aside, survey

#: How often another checkpoint is tried where the latest one goes.
_ATTEMPTS = 100


def list_checkpoints(path: Path) -> list[CheckpointInfo]:
    """The checkpoints in a run's folder, oldest first; those that cannot be read come before all others.

    They are the caller's own.
    """
    return [replace(info, metrics=dict(info.metrics)) for info in seen_checkpoints(path)]


def seen_checkpoints(path: Path) -> list[CheckpointInfo]:
    """The same for those who only look at them."""
    return survey(path, look)


def every_checkpoint(path: Path) -> list[CheckpointInfo]:
    """The same for those who ask which is the latest: nobody can tell while the file system refuses any of them.

    Raises ``StorageError`` then.
    """
    return survey(path, look_strictly)


def latest(path: Path) -> CheckpointInfo:
    """The latest complete checkpoint. Raises ``NoCheckpointError``."""
    found = seen_checkpoints(path)
    complete = [info for info in found if info.status == "complete"]
    if complete:
        return complete[-1]
    if found:
        raise NoCheckpointError(f"none of the {len(found)} checkpoint(s) in {path} can be read: {found[-1].problem}")
    raise NoCheckpointError(f"there is no checkpoint in {path}{said_of(path)}")


def is_run(path: Path) -> bool:
    """Whether a folder holds checkpoints of ours. It is a run's folder then, whatever else is in it."""
    return any(map(is_ours, seen_checkpoints(path)))


def name_ignored(path: Path) -> str | None:
    """Say which files of a run's folder could be taken for what the folder holds; ``None`` if there is none."""
    if not is_checkpoint(path):
        return None
    ignored = [file.name for file in local.files(path) if is_checkpoint(file)]
    if not ignored:
        return None
    names = ", ".join(ignored)
    return f"{path} holds checkpoints of holdfast: {names} beside them is ignored; to read it, pass its path"


def open_latest(path: Path, keys: Mapping[str, str] | None = None) -> Reader:
    """A reader for a checkpoint, or for the latest of a run's folder; where that goes meanwhile, for the next one.

    ``keys`` are those of :func:`holdfast.formats.detect.open_reader`, which says what is raised.
    """
    for _ in range(_ATTEMPTS):
        place = whereabouts(path)
        with suppress(GoneError):
            if is_run(path) or (local.is_folder(place) and not is_checkpoint(place)):
                return NativeReader(latest(path).path)
            return open_reader(place, keys)
    raise GoneError(f"the checkpoints in {path} are replaced or removed faster than one can be opened")


def whereabouts(path: Path) -> Path:
    """Where a checkpoint is that is called by its path: there, or put aside for one that has not got its name yet."""
    if local.exists(path):
        return path
    aside = (path.parent / hidden.name for hidden in put_aside(local.names(path.parent)) if hidden.tag == path.name)
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
    return find(path, tag)


def find(path: Path, tag: str) -> Path:
    """The folder of one checkpoint. Raises ``NoCheckpointError`` naming those that there are."""
    if is_native(path / tag):
        return path / tag
    every = seen_checkpoints(path)
    if same := [info.path for info in every if info.tag == tag]:
        return same[-1]
    tags = [info.tag for info in every]
    there = f"there are {', '.join(tags[-5:])}" if tags else "there is none at all"
    raise NoCheckpointError(f"there is no checkpoint {tag!r} in {path}; {there}")


@dataclass(frozen=True, slots=True)
class Successor:
    """What tells the next checkpoint of a run: its sequence, the run's id, an id of its own."""

    sequence: int
    run: str
    id: str


def successor(path: Path, runs: frozenset[str]) -> Successor:
    """The next checkpoint in a run's folder, after all that are there.

    It continues the newest of those ``runs`` that it may, by their ids; where none of them is there it begins another.
    Raises ``StorageError`` where the file system does not tell which there are.
    """
    complete = [info for info in every_checkpoint(path) if info.status == "complete"]
    sequence = min(complete[-1].sequence + 1, LARGEST) if complete else 1
    own = [info.run for info in complete if info.run in runs]
    return Successor(sequence, own[-1] if own else secrets.token_hex(8), secrets.token_hex(8))


@dataclass(frozen=True, slots=True)
class Leftover:
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


def leftovers(run: Path) -> list[Leftover]:
    """The hidden folders of saves and removals that did not end, but for those that are checkpoints still."""
    aside = {hidden.name for hidden in put_aside(local.names(run))}
    found = []
    for folder in local.hidden_folders(run):
        hidden = parse(folder.name)
        if hidden is None or folder.name in aside:
            continue
        if usage := local.usage(folder):  # else it was committed or removed meanwhile
            found.append(Leftover(folder.name, hidden.tag, folder, *usage, hidden.state))
    return found
