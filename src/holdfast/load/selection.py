"""Which checkpoint a load takes, and which one next where that one was damaged, or went while it was read."""

from __future__ import annotations

import errno
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast.errors import (
    CheckpointReplacedError,
    CorruptCheckpointError,
    FormatError,
    HoldfastError,
    MismatchError,
    NoCheckpointError,
    StorageError,
)
from holdfast.formats.detect import is_checkpoint
from holdfast.formats.native import holds_checkpoint, is_native, read_manifest
from holdfast.load.request import LoadRequest
from holdfast.run.catalog import (
    describe_ignored_files,
    find_checkpoint,
    latest_checkpoint,
    list_checkpoints_strictly,
    resolve_checkpoint_path,
)
from holdfast.run.cleanup import finish_interrupted_replace
from holdfast.run.corruption import CorruptRecord
from holdfast.run.scan import CheckpointInfo, is_own_checkpoint

#: The most tags that a message names.
_SHOWN = 5


class SelectedCheckpoint(msgspec.Struct, frozen=True, array_like=True):
    """The folder of the checkpoint to load, its tag, its id where it has one, and those passed over as corrupt.

    ``is_latest``: it was not asked for by name.
    """

    folder: str = ""
    tag: str = ""
    id: str = ""
    is_latest: bool = False
    corrupt: list[CorruptRecord] = []

    def is_there(self) -> bool:
        """Whether it is still where it was found."""
        return not self.id or holds_checkpoint(Path(self.folder), self.id)


@dataclass(frozen=True)
class SkippedCheckpoints:
    """The tags of checkpoints that a load has passed over, and what is wrong with them.

    ``corrupt`` are not what was saved; ``unfit`` are sound, and do not fit what is loaded; ``unreadable`` are of a
    newer format, or may not be read. ``reasons`` say for each corrupt one what is wrong with it.
    """

    corrupt: tuple[str, ...] = ()
    unfit: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, every: Sequence[CheckpointInfo], unloaded: Mapping[tuple[str, str], HoldfastError]
    ) -> SkippedCheckpoints:
        """Sort those that are there, of which some could not be loaded, by tag and id."""
        failed = [(info, unloaded[info.tag, info.id]) for info in every if (info.tag, info.id) in unloaded]
        unfit = tuple(info.tag for info, error in failed if isinstance(error, MismatchError))
        corrupt = {info.tag: info.problem for info in every if info.status == "damaged"}
        corrupt |= {info.tag: _reason(error) for info, error in failed if info.tag not in unfit}
        unreadable = tuple(info.tag for info in every if info.status == "unreadable")
        return cls(tuple(corrupt), unfit, unreadable, tuple(corrupt.values()))

    def describe(self) -> str:
        """Say so in a part of a sentence; empty if nothing was passed over."""
        sides = ((self.corrupt, "corrupt"), (self.unfit, "unlike what is loaded"), (self.unreadable, "unreadable"))
        return " and ".join(_describe(tags, adjective) for tags, adjective in sides if tags)


def _describe(tags: tuple[str, ...], adjective: str) -> str:
    names = ", ".join(tags[-_SHOWN:]) + (f" and {len(tags) - _SHOWN} more" if len(tags) > _SHOWN else "")
    return f"{names} {'is' if len(tags) == 1 else 'are'} {adjective}"


def _reason(error: HoldfastError) -> str:
    """What went wrong, without what was said of the arguments of a call that has gone well since."""
    return _said(error.__cause__ if isinstance(error.__cause__, HoldfastError) else error)


class CheckpointSelector:
    """Rank 0's search, over the attempts of one load. The other ranks only tell it of failures.

    :attr:`filled` are the tensors of models and optimizers that any attempt may have filled, on this rank.
    :attr:`passed` says, on rank 0, what was passed over, and :attr:`ignored` what else lies in the run's folder that
    could have been meant.
    """

    def __init__(self, request: LoadRequest, timeout: float) -> None:
        """``timeout``: seconds for which checkpoints may come and go faster than they can be loaded."""
        self._request, self._ends = request, time.monotonic() + timeout
        self._failed: tuple[SelectedCheckpoint, HoldfastError] | None = None
        self._left: HoldfastError | None = None
        #: Why others could not be loaded, by tag and id: another may have the tag meanwhile, and copies have the id.
        self._unloaded: dict[tuple[str, str], HoldfastError] = {}
        self.passed = SkippedCheckpoints()
        self.ignored: str | None = None
        self.filled: set[tuple[str, str]] = set()

    def failed(self, found: SelectedCheckpoint, filled: set[tuple[str, str]], error: HoldfastError) -> None:
        """Note why an attempt to load what was found failed, the same on all ranks, and what it has filled."""
        self._failed = found, error
        self.filled |= filled
        if filled and self._left is None:
            self._left = error

    def next(self) -> SelectedCheckpoint:
        """What to load, or to load instead. Raises the failure where there is nothing else to be tried.

        Where an attempt has left values behind, it is that one's: whatever came after it must not hide it.
        """
        if self._failed is not None:
            self._judge(*self._failed)
        finish_interrupted_replace(self._request.path)
        return self._look()

    def _judge(self, found: SelectedCheckpoint, error: HoldfastError) -> None:
        """Return where another attempt may succeed."""
        if not found.is_there():
            if self._left is error:
                self._left = CheckpointReplacedError(
                    f"{found.folder} was replaced or removed while it was loaded: {_said(error)}"
                )
            if self._is_late():
                raise self._too_fast(error) from error
        elif self._falls_back(found, error):
            self._unloaded[found.tag, found.id] = error
        else:
            raise self._left or error

    def _falls_back(self, found: SelectedCheckpoint, error: HoldfastError) -> bool:
        """Whether there may be another, and it may be loaded instead."""
        if not found.is_latest or self._request.on_corruption == "raise":
            return False
        missing = isinstance(error, StorageError) and error.errno == errno.ENOENT
        unfit = isinstance(error, MismatchError) and bool(self._unloaded)
        return missing or unfit or isinstance(error, CorruptCheckpointError)

    def _is_late(self) -> bool:
        return time.monotonic() > self._ends

    def _too_fast(self, error: HoldfastError) -> CheckpointReplacedError:
        return CheckpointReplacedError(
            f"the checkpoints in {self._request.path} are replaced or removed faster than one can be loaded; "
            f"keep more of them: {_said(self._left or error)}"
        )

    def _look(self) -> SelectedCheckpoint:
        while True:
            try:
                return self._chosen()
            except CheckpointReplacedError as error:
                if self._is_late():
                    raise self._too_fast(error) from error
            except (CorruptCheckpointError, NoCheckpointError) as error:
                if self._left is None:
                    raise
                raise self._left from error

    def _chosen(self) -> SelectedCheckpoint:
        """Raises ``NoCheckpointError``, ``StorageError``, or ``CorruptCheckpointError`` where nobody wants to fall back."""
        path, tag = self._request.path, self._request.tag
        if tag is not None:
            return _named(find_checkpoint(path, tag), tag)
        every = list_checkpoints_strictly(path)
        if not any(map(is_own_checkpoint, every)):
            place = resolve_checkpoint_path(path)
            if is_native(place):
                return _named(place, path.name)
            if is_checkpoint(place):
                return SelectedCheckpoint(str(place), path.name)
        self.ignored = describe_ignored_files(path)
        unreadable = [info for info in every if info.status != "complete"]
        if unreadable and self._request.on_corruption == "raise":
            kind = CorruptCheckpointError if unreadable[0].status == "damaged" else FormatError
            raise kind(f"{unreadable[0].problem}; it may be the newest checkpoint: remove it, or name another by tag")
        sound = [info for info in every if info.status == "complete" and (info.tag, info.id) not in self._unloaded]
        if not sound and self._unloaded:
            raise next(iter(self._unloaded.values()))
        chosen = sound[-1] if sound else latest_checkpoint(path)
        self.passed = SkippedCheckpoints.of(every, self._unloaded)
        corrupt = [CorruptRecord.of(path / tag, tag) for tag in self.passed.corrupt]
        return SelectedCheckpoint(str(chosen.path), chosen.tag, chosen.id, is_latest=True, corrupt=corrupt)


def _named(folder: Path, tag: str) -> SelectedCheckpoint:
    """A checkpoint that was asked for. Raises ``CheckpointReplacedError`` where it goes while it is looked at."""
    try:
        return SelectedCheckpoint(str(folder), tag, read_manifest(folder).id)
    except NoCheckpointError:
        raise
    except HoldfastError:  # every rank will say so when it reads it
        return SelectedCheckpoint(str(folder), tag)


def _said(error: HoldfastError) -> str:
    return str(error.args[-1])
