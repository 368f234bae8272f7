"""Selects the checkpoint to load, and the next one if that one is corrupt or was replaced while it was read.

Rank 0 selects in its decision in the vote "finding the checkpoint to load" (:mod:`rankless.load.load_operation`);
:mod:`rankless.load.fallback` notes failures on all ranks. A checkpoint that cannot be read for a moment must not be
skipped: the next save hides a checkpoint that is skipped as corrupt.

A checkpoint whose files do not fit is *replaced*, and not corrupt, if its directory has another id by now. The CRCs of
the manifest cover every byte; a load without verification compares the manifest once more at its end.
"""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rankless.errors import (
    CheckpointReplacedError,
    CorruptCheckpointError,
    FormatError,
    MismatchError,
    NoCheckpointError,
    OutsideLinkError,
    RanklessError,
    StorageError,
    UnstableReadError,
)
from rankless.formats.detect import is_checkpoint
from rankless.formats.native import NativeReader, holds_checkpoint, is_native, read_manifest
from rankless.load.load_request import LoadRequest
from rankless.observe.warning import warn_caller
from rankless.process.prepared_types import prepared
from rankless.run.catalog import cached_checkpoints, find_checkpoint
from rankless.run.checkpoint_info import CheckpointInfo, RunScan, is_rankless_checkpoint
from rankless.run.corruption import CorruptRecord
from rankless.run.lookup import (
    all_abandoned_error,
    describe_ignored_files,
    has_lost_manifest,
    latest_checkpoint,
    lost_files_error,
    resolve_checkpoint_path,
)
from rankless.run.run_store import run_store_of
from rankless.run.stored_history import read_history
from rankless.run.tag_arguments import Best, resolve_tag
from rankless.run.tier_parts_removal import FOLDER
from rankless.storage.store import store_of
from rankless.tier.part_names import GenerationKey

if TYPE_CHECKING:
    from rankless.tier.generation_catalog import LocalCheckpoint  # few jobs have a local tier

#: Seconds between two attempts to select a checkpoint while others are replaced; in an object store they grow.
_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 0.01, 1.0

#: How often an attempt in an object store may fail for the same reason.
_MOST_RECURRENCES = 12

#: The maximum number of tags that a message names.
_MAX_SHOWN = 5


@prepared
class SelectedCheckpoint(msgspec.Struct, frozen=True, array_like=True):
    """The checkpoint to load: its folder, its tag, its id if it has one, and the corrupt checkpoints skipped for it.

    ``folder`` is in the encoding of the file system, because a name need not be UTF-8.
    ``is_latest``: it was selected as the latest checkpoint, and not by its tag. ``generation``: it is loaded from the
    local tier; the folder need not exist. ``newest``, ``seen`` and ``token`` are
    fields of :class:`rankless.run.claims.LoadedBase`.
    """

    folder: bytes = b""
    tag: str = ""
    id: str = ""
    is_latest: bool = False
    corrupt: list[CorruptRecord] = []
    generation: GenerationKey | None = None
    newest: int | None = None
    seen: int = 0
    token: str = ""

    def locate(self, run: Path) -> Path:
        """Return the path of the folder. ``run`` is the path that the caller has passed."""
        return store_of(run).path(os.fsdecode(self.folder))

    def still_exists(self, run: Path) -> bool:
        """Return whether the folder still holds this checkpoint; also if it should, but has lost its files."""
        folder = self.locate(run)
        if self.generation is not None or not self.id or holds_checkpoint(folder, self.id):
            return True
        return run_store_of(folder.parent).is_named(folder)


class SkippedCheckpoints(msgspec.Struct, frozen=True):
    """The tags of checkpoints that a load has skipped, by the reason.

    ``corrupt`` checkpoints have other bytes than were saved. ``mismatched`` ones are intact, but do not match the
    caller's objects. ``unreadable`` ones are in a newer format, or may not be read. ``reasons`` has an error message
    for each corrupt one. For example, ``step_30`` is corrupt, and ``step_20`` is loaded.
    """

    corrupt: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()

    @classmethod
    def from_infos(
        cls, infos: Sequence[CheckpointInfo], errors: Mapping[tuple[str, str], RanklessError]
    ) -> SkippedCheckpoints:
        """Classify checkpoints. ``errors`` has, by tag and id, the error of each one that could not be loaded."""
        failed = [(info, errors[info.tag, info.id]) for info in infos if (info.tag, info.id) in errors]
        mismatched = tuple(info.tag for info, error in failed if isinstance(error, MismatchError))
        corrupt = {info.tag: info.problem for info in infos if info.status == "damaged"}
        corrupt |= {info.tag: _root_message(error) for info, error in failed if info.tag not in mismatched}
        unreadable = tuple(info.tag for info in infos if info.status == "unreadable")
        return cls(tuple(corrupt), mismatched, unreadable, tuple(corrupt.values()))

    def describe(self) -> str:
        """Describe the skipped checkpoints as part of a sentence. Return an empty text if there are none.

        For example, ``step_30 is corrupt``.
        """
        reasons = (
            (self.corrupt, "is corrupt", "are corrupt"),
            (self.mismatched, "does not match the objects passed", "do not match the objects passed"),
            (self.unreadable, "is unreadable", "are unreadable"),
        )
        return "; ".join(
            f"{_list_tags(tags)} {singular if len(tags) == 1 else plural}" for tags, singular, plural in reasons if tags
        )


def _list_tags(tags: tuple[str, ...]) -> str:
    return ", ".join(tags[-_MAX_SHOWN:]) + (f" and {len(tags) - _MAX_SHOWN} more" if len(tags) > _MAX_SHOWN else "")


def _root_message(error: RanklessError) -> str:
    """Return the message of the error's cause, without the advice for the arguments of the failed call."""
    return _error_message(error.__cause__ if isinstance(error.__cause__, RanklessError) else error)


class CheckpointSelector:
    """The selection of checkpoints on rank 0, over all attempts of one load. Other ranks only note failures.

    :attr:`filled` are the tensors of models and optimizers that any attempt may have filled, on this rank.
    :attr:`skipped` are, on rank 0, the checkpoints that were skipped. :attr:`ignored` is a warning about other files in
    the run directory that the caller may have meant.
    """

    def __init__(self, request: LoadRequest, timeout: float, local: Sequence[LocalCheckpoint] = ()) -> None:
        """``timeout``: the seconds after which a load fails if checkpoints are replaced faster than it can read one.

        ``local`` are the complete checkpoints in the local tier, oldest first.
        """
        self._local = list(local)
        #: The errors after which a checkpoint was read once more, and not found corrupt, by tag and id.
        self.wrong_reads: dict[tuple[str, str], str] = {}
        #: The errors of the generations in the local tier that could not be loaded.
        self.lost_generations: list[str] = []
        self._request, self._deadline = request, time.monotonic() + timeout
        self._failed: tuple[SelectedCheckpoint, RanklessError] | None = None
        #: The error of the first attempt that may have filled tensors.
        self._filling_error: RanklessError | None = None
        #: The errors of failed attempts, by tag and id: a tag may be reused meanwhile, and copies have the same id.
        self._errors: dict[tuple[str, str], RanklessError] = {}
        #: The tags and ids of checkpoints that were read again, because bytes may have been read wrong.
        self._read_again: set[tuple[str, str]] = set()
        #: How often each event has ended an attempt in an object store.
        self._events: Counter[str] = Counter()
        self.skipped = SkippedCheckpoints()
        self.ignored: str | None = None
        self.filled: set[tuple[str, str]] = set()

    def note_failure(self, selected: SelectedCheckpoint, filled: set[tuple[str, str]], error: RanklessError) -> None:
        """Record the error of a failed attempt, which is the same on all ranks, and the tensors it may have filled.

        All ranks call it, between two attempts.
        """
        self._failed = selected, error
        self.filled |= filled
        if filled and self._filling_error is None:
            self._filling_error = error

    def select_next(self) -> SelectedCheckpoint:
        """Return the checkpoint to load, or the next one after a failure. Raise the failure if there is none.

        If an earlier attempt may have partly filled the tensors, raise that attempt's error rather than a later one.

        Rank 0 calls it, in a vote; its error is raised on all ranks.
        """
        if self._failed is not None:
            self._handle_failure(*self._failed)
        path = self._request.path
        if _has_collected(path):
            self._publish_collected(path)
        return self._retry_until_stable()

    def _publish_collected(self, run: Path) -> None:
        """Write a checkpoint if its parts are in the run directory, and a process died before it wrote it."""
        from rankless.save.offline_drain import publish_collected  # noqa: PLC0415 - hardly any load needs its modules

        try:
            publish_collected(run, self._request.on_event)
        except RanklessError as error:
            warn_caller(f"a checkpoint could not be written from the parts in {run / FOLDER}: {_error_message(error)}")

    def _handle_failure(self, selected: SelectedCheckpoint, error: RanklessError) -> None:
        """Return if another attempt may succeed; raise the error otherwise."""
        if not selected.still_exists(self._request.path) and not self._recurs(os.fsdecode(selected.folder)):
            if self._filling_error is error:
                folder = selected.locate(self._request.path)
                self._filling_error = CheckpointReplacedError(
                    f"{folder} was replaced or removed while it was loaded: {_error_message(error)}"
                )
            if self._is_timed_out():
                raise self._timeout_error(error) from error
        elif self._may_read_again(selected, error):
            self._read_again.add((selected.tag, selected.id))
            if not _is_missing(error):  # which replicas that lag explain
                self.wrong_reads[selected.tag, selected.id] = _root_message(error)
        elif selected.generation is not None:
            self._local = [one for one in self._local if one.key != selected.generation]
            self.lost_generations.append(_root_message(error))
            if isinstance(error, MismatchError | UnstableReadError):
                raise self._filling_error or error
        elif self._may_fall_back(selected, error):
            folder = selected.locate(self._request.path)
            is_lost = isinstance(error, CheckpointReplacedError) and has_lost_manifest(folder)
            self._errors[selected.tag, selected.id] = lost_files_error(folder) if is_lost else error
            self.wrong_reads.pop((selected.tag, selected.id), None)
        else:
            raise self._filling_error or error

    def _may_read_again(self, selected: SelectedCheckpoint, error: RanklessError) -> bool:
        """Return whether stored bytes may be intact: bytes change on their way, and replicas of a store lag, too."""
        is_distant = selected.generation is None and store_of(self._request.path).is_remote
        may_be_wrong = _is_missing(error) or isinstance(error, CorruptCheckpointError)
        is_unclear = isinstance(error, UnstableReadError) or (is_distant and may_be_wrong)
        return is_unclear and (selected.tag, selected.id) not in self._read_again

    def _may_fall_back(self, selected: SelectedCheckpoint, error: RanklessError) -> bool:
        """Return whether another checkpoint may be loaded instead."""
        if not selected.is_latest or self._request.on_corruption == "raise":
            return False
        is_mismatched = isinstance(error, MismatchError) and bool(self._errors)
        return is_mismatched or self._is_proven(selected, error)

    def _is_proven(self, selected: SelectedCheckpoint, error: RanklessError) -> bool:
        """Return whether a checkpoint is corrupt or has lost files: it may be hidden, and its tag used again."""
        if isinstance(error, CorruptCheckpointError):
            return not isinstance(error, OutsideLinkError)
        return _is_missing(error) and _has_lost_files(selected.locate(self._request.path))

    def _recurs(self, event: str) -> bool:
        """Wait before another attempt. Return whether the same event has ended too many of them.

        In an object store the names of folders are never used again, so nothing changes then.
        """
        if not store_of(self._request.path).is_remote:
            time.sleep(_RETRY_SECONDS)
            return False
        self._events[event] += 1
        time.sleep(min(_LONGEST_RETRY_SECONDS, _RETRY_SECONDS * 2 ** self._events[event]))
        return self._events[event] > _MOST_RECURRENCES

    def _is_timed_out(self) -> bool:
        return time.monotonic() > self._deadline

    def _timeout_error(self, error: RanklessError) -> CheckpointReplacedError:
        return CheckpointReplacedError(
            f"the checkpoints in {self._request.path} are replaced or removed faster than one can be loaded; "
            f"keep more of them: {_error_message(self._filling_error or error)}"
        )

    def _retry_until_stable(self) -> SelectedCheckpoint:
        """Select a checkpoint. Try again if checkpoints are replaced meanwhile, until the deadline."""
        while True:
            try:
                return self._select_checkpoint()
            except CheckpointReplacedError as error:
                if error in self._errors.values():
                    raise self._filling_error or error from None
                if self._is_timed_out():
                    raise self._timeout_error(error) from error
                if self._recurs(_error_message(error)):
                    raise StorageError(
                        errno.EIO, f"{_error_message(error)}, but the server still names it: try again later"
                    ) from error
            except (CorruptCheckpointError, NoCheckpointError) as error:
                if self._filling_error is None:
                    raise
                raise self._filling_error from error

    def _select_checkpoint(self) -> SelectedCheckpoint:
        """Return the requested checkpoint, or the newest intact one.

        Raises ``NoCheckpointError``, ``StorageError``, or ``CorruptCheckpointError`` if the caller does not want to
        fall back.
        """
        path, tag = self._request.path, self._request.tag
        if tag is not None and (resolved := self._resolve_tag(tag)) is not None:
            try:
                return self._find_local(resolved) or _select_folder(find_checkpoint(path, resolved), resolved)
            except NoCheckpointError as error:
                if type(error) is not NoCheckpointError or not self._local:  # one that was replaced is looked for again
                    raise
                tags = ", ".join(one.manifest.tag for one in self._local[-_MAX_SHOWN:])
                raise NoCheckpointError(f"{error}; in the local tier there are {tags}") from error
        scan = run_store_of(path).look(is_strict=True)
        infos = scan.checkpoints
        if not any(map(is_rankless_checkpoint, infos)) and (selected := self._select_itself(path, scan)) is not None:
            return selected
        self.ignored = describe_ignored_files(path)
        unreadable = [info for info in infos if info.status != "complete"]
        if unreadable and self._request.on_corruption == "raise":
            kind = CorruptCheckpointError if unreadable[0].status == "damaged" else FormatError
            raise kind(
                f"{unreadable[0].problem}; it may be the newest checkpoint: remove it, or pass the tag of another"
            )
        intact = [info for info in infos if info.status == "complete" and (info.tag, info.id) not in self._errors]
        if not intact and self._errors:
            raise next(iter(self._errors.values()))
        if self._local and (not intact or self._local[-1].age >= intact[-1].age):
            return self._select_latest_local(scan)
        if not intact:
            latest_checkpoint(path)  # raises an error, unless one has appeared meanwhile
            return self._select_checkpoint()
        latest = intact[-1]
        if not latest.is_current:
            raise next(iter(self._errors.values()), all_abandoned_error(path, infos))
        self.skipped = SkippedCheckpoints.from_infos(infos, self._errors)
        corrupt = [CorruptRecord.of(path, info.tag, info.id) for info in infos if info.tag in self.skipped.corrupt]
        selected = SelectedCheckpoint(os.fsencode(str(latest.path)), latest.tag, latest.id, corrupt=corrupt)
        return _as_latest(selected, scan, latest.run, latest.sequence)

    def _select_itself(self, path: Path, scan: RunScan) -> SelectedCheckpoint | None:
        """Return the checkpoint that a path without rankless checkpoints is itself, or the local tier's."""
        resolved = resolve_checkpoint_path(path)
        if is_native(resolved):
            return _select_folder(resolved, path.name)
        if is_checkpoint(resolved):
            tag = os.fsencode(path.name).decode(errors="replace")  # for messages
            return SelectedCheckpoint(os.fsencode(str(_newest_version(resolved))), tag)
        return self._select_latest_local(scan) if self._local else None

    def _resolve_tag(self, tag: str | Best) -> str | None:
        """Return the tag that is meant; ``None`` for the latest checkpoint if the run went back to it already."""
        resolved = resolve_tag(self._request.path, tag)
        if not self._request.goes_back_once or not self._has_gone_back(resolved):
            return resolved
        warn_caller(
            f"{self._request.path} went back to {resolved!r} already, so the latest checkpoint is loaded: to go "
            "back once more, pass again=True"
        )
        return None

    def _has_gone_back(self, tag: str) -> bool:
        """Return whether the run of a checkpoint went back to it, and went on from there."""
        found = [info for info in cached_checkpoints(self._request.path) if info.tag == tag and info.is_current]
        runs = read_history(self._request.path).runs
        return any(info.run in runs and runs[info.run].rolled_back_to == info.id for info in found)

    def _find_local(self, tag: str) -> SelectedCheckpoint | None:
        """Return the checkpoint of a tag in the local tier, unless there is a newer one in the run directory."""
        tagged = [one for one in self._local if one.manifest.tag == tag]
        durable = [info.age for info in cached_checkpoints(self._request.path) if info.tag == tag]
        if not tagged or max(durable, default=tagged[-1].age) > tagged[-1].age:
            return None
        return self._select_local(tagged[-1])

    def _select_latest_local(self, scan: RunScan) -> SelectedCheckpoint:
        manifest = self._local[-1].manifest
        return _as_latest(self._select_local(self._local[-1]), scan, manifest.run, manifest.sequence)

    def _select_local(self, local: LocalCheckpoint) -> SelectedCheckpoint:
        tag = local.manifest.tag
        folder = os.fsencode(str(self._request.path / tag))
        return SelectedCheckpoint(folder, tag, local.manifest.id, generation=local.key)


def _newest_version(path: Path) -> Path:
    """Return the newest version of a directory of published weights, and any other path as it is.

    All ranks load the version that rank 0 has found.
    """
    from rankless.formats.weights.version_files import find_newest  # noqa: PLC0415 - a native load needs none of it

    return find_newest(path) or path


def _as_latest(selected: SelectedCheckpoint, scan: RunScan, run: str, sequence: int) -> SelectedCheckpoint:
    """Return a checkpoint that was selected as the latest one, with the facts of its run then.

    Its own sequence number counts too: the local tier is ahead, or all that were listed were removed since.
    """
    current = [info.sequence for info in scan.checkpoints if info.run == run and info.is_current]
    branch = scan.history.runs.get(run)
    seen = 0 if branch is None else branch.incarnation
    return msgspec.structs.replace(selected, is_latest=True, newest=max([sequence, *current]), seen=seen)


def _has_collected(run: Path) -> bool:
    """Return whether hosts have put parts of checkpoints into a run directory. Repair its names, too."""
    return FOLDER in run_store_of(run).repair_names()


def _has_lost_files(folder: Path) -> bool:
    """Return whether files of a checkpoint are missing or corrupt on this host, and not only on another one."""
    try:
        NativeReader(folder).check_files()
    except RanklessError as error:
        return isinstance(error, CorruptCheckpointError | NoCheckpointError)
    return False


def _select_folder(folder: Path, tag: str) -> SelectedCheckpoint:
    """Select a checkpoint by its folder. Raises ``CheckpointReplacedError`` if it is replaced or removed meanwhile."""
    try:
        return SelectedCheckpoint(os.fsencode(str(folder)), tag, read_manifest(folder).id)
    except NoCheckpointError as error:
        if has_lost_manifest(folder):
            raise lost_files_error(folder) from error
        raise
    except RanklessError:  # all ranks raise it when they read the manifest
        return SelectedCheckpoint(os.fsencode(str(folder)), tag)


def _is_missing(error: RanklessError) -> bool:
    """Return whether a file was missing, though the checkpoint still exists: the file is lost."""
    return isinstance(error, CheckpointReplacedError) or (
        isinstance(error, StorageError) and error.errno == errno.ENOENT
    )


def _error_message(error: RanklessError) -> str:
    return str(error.args[-1])
