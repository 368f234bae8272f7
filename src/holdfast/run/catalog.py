"""The catalog of a run directory: its checkpoints, the latest one, and the identity of the next one."""

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
    displaced_checkpoints,
    is_holdfast_checkpoint,
    read_info,
    read_info_strictly,
    scan_run,
)
from holdfast.storage import posix

#: The maximum number of attempts to open the latest checkpoint while others are replaced or removed.
_ATTEMPTS = 100


def list_checkpoints(path: Path) -> list[CheckpointInfo]:
    """Return the checkpoints in a run directory, oldest first. Unreadable ones come before all others.

    The objects are copies that the caller may change.
    """
    return [replace(info, metrics=dict(info.metrics)) for info in cached_checkpoints(path)]


def cached_checkpoints(path: Path) -> list[CheckpointInfo]:
    """Return the checkpoints like :func:`list_checkpoints`, but as cached objects, which must not be changed."""
    return scan_run(path, read_info)


def list_checkpoints_strictly(path: Path) -> list[CheckpointInfo]:
    """Return the checkpoints like :func:`cached_checkpoints`, but raise ``StorageError`` if one cannot be read.

    The latest checkpoint is unknown then.
    """
    return scan_run(path, read_info_strictly)


def latest_checkpoint(path: Path) -> CheckpointInfo:
    """Return the latest complete checkpoint. Raises ``NoCheckpointError`` if there is none."""
    infos = cached_checkpoints(path)
    complete = [info for info in infos if info.status == "complete"]
    if complete:
        return complete[-1]
    if infos:
        raise NoCheckpointError(f"none of the {len(infos)} checkpoint(s) in {path} can be read: {infos[-1].problem}")
    raise NoCheckpointError(f"there is no checkpoint in {path}{describe_contents(path)}")


def is_run_directory(path: Path) -> bool:
    """Return whether a directory contains holdfast checkpoints. If so, it is a run directory."""
    return any(map(is_holdfast_checkpoint, cached_checkpoints(path)))


def describe_ignored_files(path: Path) -> str | None:
    """Return a warning about other checkpoint files in a run directory, or ``None`` if there are none."""
    if not is_checkpoint(path):
        return None
    ignored = [file.name for file in posix.list_files(path) if is_checkpoint(file)]
    if not ignored:
        return None
    names = ", ".join(ignored)
    return f"{path} contains holdfast checkpoints: {names} next to them is ignored; to read it, pass its path"


def open_latest(path: Path, keys: Mapping[str, str] | None = None) -> Reader:
    """Open a checkpoint, or the latest checkpoint of a run directory, for reading.

    If the latest checkpoint is replaced or removed meanwhile, try again. ``keys`` and the errors are those of
    :func:`holdfast.formats.detect.open_reader`. Raises ``CheckpointReplacedError`` if all attempts fail.
    """
    for _ in range(_ATTEMPTS):
        resolved = resolve_checkpoint_path(path)
        with suppress(CheckpointReplacedError):
            if is_run_directory(path) or (posix.is_directory(resolved) and not is_checkpoint(resolved)):
                return NativeReader(latest_checkpoint(path).path)
            return open_reader(resolved, keys)
    raise CheckpointReplacedError(f"the checkpoints in {path} are replaced or removed faster than one can be opened")


def resolve_checkpoint_path(path: Path) -> Path:
    """Return ``path``, or the hidden directory that holds its checkpoint after an interrupted replace.

    A replace is interrupted if the save died between its two renames.
    """
    if posix.path_exists(path):
        return path
    displaced = (
        path.parent / hidden.name
        for hidden in displaced_checkpoints(posix.list_names(path.parent))
        if hidden.tag == path.name
    )
    return next(displaced, path)


def checkpoint_path(path: Path, tag: str) -> Path:
    """Return the path of the checkpoint ``tag`` in a run directory. It may be in any format.

    Raises ``NoCheckpointError``, which names the existing tags, or ``InvalidArgumentError`` if the tag is invalid or
    ``path`` is a checkpoint itself.
    """
    tagged = path / check_tag(tag)
    if is_native(tagged) or (not is_native(path) and is_checkpoint(tagged)):
        return tagged
    if is_checkpoint(path) and not list_checkpoints(path):
        raise InvalidArgumentError(f"{path} is a checkpoint itself, not a run directory: leave out the tag {tag!r}")
    return find_checkpoint(path, tag)


def find_checkpoint(path: Path, tag: str) -> Path:
    """Return the directory of the holdfast checkpoint ``tag`` in a run.

    Raises ``NoCheckpointError``, which names the existing tags, if there is none.
    """
    if is_native(path / tag):
        return path / tag
    infos = cached_checkpoints(path)
    if matches := [info.path for info in infos if info.tag == tag]:
        return matches[-1]
    tags = [info.tag for info in infos]
    existing = f"there are {', '.join(tags[-5:])}" if tags else "there is none at all"
    raise NoCheckpointError(f"there is no checkpoint {tag!r} in {path}; {existing}")


@dataclass(frozen=True, slots=True)
class CheckpointIdentity:
    """The identity of a checkpoint: its sequence number, the id of its run, and its own id."""

    sequence: int
    run: str
    id: str


def next_identity(path: Path, runs: frozenset[str]) -> CheckpointIdentity:
    """Return the identity of the next checkpoint in a run directory.

    The checkpoint continues the newest of the ``runs``, given by their ids, that has a checkpoint in the directory. If
    none has, it starts a new run. Raises ``StorageError`` if the existing checkpoints cannot be read.
    """
    complete = [info for info in list_checkpoints_strictly(path) if info.status == "complete"]
    sequence = min(complete[-1].sequence + 1, LARGEST) if complete else 1
    continued = [info.run for info in complete if info.run in runs]
    return CheckpointIdentity(sequence, continued[-1] if continued else secrets.token_hex(8), secrets.token_hex(8))


@dataclass(frozen=True, slots=True)
class StaleDirectory:
    """A hidden directory of an interrupted save or removal, or of one that is still in progress: this is unknown here.

    ``state`` is ``"partial"``, ``"replaced"``, ``"removed"`` or ``"corrupt"``. ``nbytes`` is the disk usage of its
    files, ``time`` the time of its last change in seconds since 1970.
    """

    name: str
    tag: str
    path: Path
    time: float
    nbytes: int
    state: str = "partial"


def list_stale_directories(run: Path) -> list[StaleDirectory]:
    """Return the hidden directories of saves and removals in a run, except those that still are its checkpoints."""
    displaced = {hidden.name for hidden in displaced_checkpoints(posix.list_names(run))}
    stale = []
    for folder in posix.list_hidden_directories(run):
        hidden = parse_hidden_name(folder.name)
        if hidden is None or folder.name in displaced:
            continue
        if usage := posix.disk_usage(folder):  # else it was committed or removed meanwhile
            stale.append(StaleDirectory(folder.name, hidden.tag, folder, *usage, hidden.state))
    return stale
