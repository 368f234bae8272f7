"""Lookup of the checkpoint that a path and a tag mean, in any format.

The view, conversions, ``open_weights`` and the commands open checkpoints through :func:`open_latest`; of several ranks
each opens for itself, and a vote compares. A load has a selection of its own on rank 0
(:mod:`rankless.load.selection`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rankless.errors import (
    CheckpointReplacedError,
    CorruptCheckpointError,
    EmptyRunError,
    InvalidArgumentError,
    NoCheckpointError,
    RanklessError,
)
from rankless.formats.detect import describe_contents, is_checkpoint, open_reader
from rankless.formats.native import NativeReader, is_native, read_manifest
from rankless.formats.reader import Reader
from rankless.run.catalog import cached_checkpoints, describe_tags, find_checkpoint, is_run_directory, list_checkpoints
from rankless.run.checkpoint_info import CheckpointInfo, is_rankless_checkpoint
from rankless.run.displaced_checkpoints import displaced_checkpoints
from rankless.run.folder_names import is_saved_folder
from rankless.run.run_store import run_store_of
from rankless.run.tag_arguments import Best, resolve_tag
from rankless.storage import posix
from rankless.storage.store import store_of

#: The maximum number of attempts to open the latest checkpoint while others are replaced or removed, and the seconds
#: between two of them.
_ATTEMPTS, _RETRY_SECONDS = 100, 0.01


def latest_checkpoint(path: Path) -> CheckpointInfo:
    """Return the latest complete checkpoint. Raises ``NoCheckpointError`` if none can be read.

    A load calls it on rank 0, in the vote "finding the checkpoint to load".
    """
    return _choose_latest(path, cached_checkpoints(path))


def _choose_latest(path: Path, infos: Sequence[CheckpointInfo]) -> CheckpointInfo:
    """Return the latest complete checkpoint of those in a directory."""
    complete = [info for info in infos if info.status == "complete"]
    if complete:
        if not complete[-1].is_current:
            raise all_abandoned_error(path, complete)
        return complete[-1]
    if infos:
        raise NoCheckpointError(f"none of the {len(infos)} checkpoint(s) in {path} can be read: {infos[-1].problem}")
    raise EmptyRunError(f"there is no checkpoint in {path}{describe_contents(path)}")


def all_abandoned_error(path: Path, infos: Sequence[CheckpointInfo]) -> NoCheckpointError:
    """Return the error of a run directory that has lost all its current checkpoints."""
    tags = ", ".join(info.tag for info in infos if info.status == "complete")
    return NoCheckpointError(
        f"what the run in {path} should go on from is missing, and its other checkpoints are abandoned: pass the tag "
        f"of one of them to go back to it; there are: {tags}"
    )


def describe_ignored_files(path: Path) -> str | None:
    """Return a warning about other checkpoint files in a run directory, or ``None`` if there are none.

    Hidden files are left out: they are the run's own.
    """
    if store_of(path).is_remote:
        return None
    ignored = [file.name for file in posix.list_files(path) if not file.name.startswith(".") and is_checkpoint(file)]
    if not ignored or not is_checkpoint(path) or not is_run_directory(path):
        return None
    names = ", ".join(ignored)
    return f"{path} contains rankless checkpoints: {names} next to them is ignored; to read it, pass its path"


def open_latest(
    path: Path, keys: Mapping[str, str] | None = None, tag: str | Best | None = None, *, is_lazy: bool = False
) -> Reader:
    """Open a checkpoint for reading: by its own path, or by a tag in a run directory, by default the latest one.

    If the checkpoint is replaced or removed meanwhile, try again. ``keys`` and the errors are as in
    :func:`rankless.formats.detect.open_reader`. ``is_lazy``: see :class:`NativeReader`. Raises
    ``CheckpointReplacedError`` if all attempts fail.

    Each process calls it for itself.
    """
    for _ in range(_ATTEMPTS):
        # In an object store a tag names a folder of a save, also if that is removed meanwhile.
        chosen = path if tag is None else checkpoint_path(path, tag)
        is_folder = tag is not None and _has_name_of_save(chosen)
        resolved = chosen if is_folder else resolve_checkpoint_path(chosen)
        with suppress(CheckpointReplacedError):
            if is_folder or _is_saved_in_store(resolved):
                return NativeReader(resolved, keys=keys, is_lazy=is_lazy)
            infos = cached_checkpoints(chosen)
            is_run = any(map(is_rankless_checkpoint, infos))
            if is_run or (store_of(resolved).is_directory(resolved) and not is_checkpoint(resolved)):
                resolved = _choose_latest(chosen, infos).path
                return NativeReader(resolved, keys=keys, is_lazy=is_lazy and store_of(resolved).is_remote)
            return open_at(resolved, keys)
        if has_lost_manifest(resolved):
            raise lost_files_error(resolved)
        time.sleep(_RETRY_SECONDS)
    raise CheckpointReplacedError(f"the checkpoints in {path} are replaced or removed faster than one can be opened")


def open_at(path: Path, keys: Mapping[str, str] | None = None) -> Reader:
    """Open the checkpoint at a path: see :func:`rankless.formats.detect.open_reader`.

    If nothing is at the path, and a run is above it, the error names the checkpoints of the run: a tag was mistyped.

    :func:`open_latest` and the inspection of a checkpoint call it, each process for itself.
    """
    try:
        return open_reader(path, keys)
    except NoCheckpointError as error:
        if isinstance(error, CheckpointReplacedError) or _is_in_bucket_root(path) or store_of(path).path_exists(path):
            raise
        infos: Sequence[CheckpointInfo] = []
        with suppress(RanklessError):  # whatever is above it, the path is missing
            infos = cached_checkpoints(path.parent)
        if not any(map(is_rankless_checkpoint, infos)):
            raise
        raise NoCheckpointError(f"{error}; in {path.parent} {describe_tags(infos)}") from error


def _is_in_bucket_root(path: Path) -> bool:
    return store_of(path).is_remote and (path.parent == path.parent.parent or not path.parent.parts[1:])


def _is_saved_in_store(path: Path) -> bool:
    """Return whether a path is a checkpoint that a save has put into an object store: neither a run nor another format.

    To find that out for any path takes dozens of requests.
    """
    return _has_name_of_save(path) and is_native(path)


def _has_name_of_save(path: Path) -> bool:
    return store_of(path).is_remote and is_saved_folder(path.name)


def resolve_checkpoint_path(path: Path) -> Path:
    """Return ``path``, or the path that has the checkpoint of this tag.

    In an object store the name of a folder is a tag and an id. On a file system a save that replaced a checkpoint may
    have died between two renames: then the checkpoint is in a hidden directory.
    """
    if store_of(path).is_remote:
        if _is_in_bucket_root(path) or is_native(path):
            return path
        return run_store_of(path.parent).find_named(path.name) or path
    if store_of(path).path_exists(path):
        return path
    displaced = (
        path.parent / hidden.name
        for hidden in displaced_checkpoints(posix.list_names(path.parent))
        if hidden.tag == path.name
    )
    return next(displaced, path)


def checkpoint_path(path: Path, tag: str | Best) -> Path:
    """Return the path of the checkpoint ``tag`` in a run directory. It may be in any format.

    ``tag`` may be an alias, and of published weights the number of a version. Raises ``NoCheckpointError``, which names
    the existing tags, or ``InvalidArgumentError`` if the tag is invalid or ``path`` is a checkpoint itself.
    """
    run = run_store_of(path)
    if isinstance(tag, str) and (folder := run.find_named(tag)) is not None:
        return folder
    tag = resolve_tag(path, tag)
    if (folder := run.find_named(tag)) is not None:  # of an alias
        return folder
    tagged = path / tag
    if is_native(tagged) or (not is_native(path) and is_checkpoint(tagged)):
        return tagged
    if not list_checkpoints(path) and is_checkpoint(path):
        return _version_path(path, tag)
    return find_checkpoint(path, tag)


def _version_path(path: Path, tag: str) -> Path:
    """Return the path of a version of published weights. Raises ``InvalidArgumentError`` for another checkpoint."""
    from rankless.formats.weights.version_files import find_newest, version_path  # noqa: PLC0415 - rarely needed

    if find_newest(path) is None:
        raise InvalidArgumentError(f"{path} is a checkpoint itself, not a run directory: leave out the tag {tag!r}")
    return version_path(path, tag)


def has_lost_manifest(folder: Path) -> bool:
    """Return whether a folder is a checkpoint of its run although its manifest is missing."""
    if not run_store_of(folder.parent).is_named(folder):
        return False
    try:
        read_manifest(folder)
    except CheckpointReplacedError:
        return True
    except RanklessError:  # it is there
        return False
    return False


def lost_files_error(folder: Path) -> CorruptCheckpointError:
    """Return the error of a checkpoint with missing files."""
    return CorruptCheckpointError(
        f"{folder} has no manifest, but its tag still names it: something else than rankless has removed its files"
    )
