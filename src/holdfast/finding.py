"""Which checkpoint a load takes, and which one next where that one was damaged, or went while it was read."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import msgspec

from holdfast.catalog import every_checkpoint, find, latest, whereabouts
from holdfast.errors import (
    DamagedError,
    FormatError,
    GoneError,
    HoldfastError,
    MismatchError,
    NoCheckpointError,
    StorageError,
)
from holdfast.formats.detect import is_checkpoint
from holdfast.formats.native import holds, is_native, read_manifest
from holdfast.request import LoadRequest
from holdfast.upkeep import recover


class Found(msgspec.Struct, frozen=True, array_like=True):
    """The folder of the checkpoint to load, its tag, its id where it has one, and the tags passed over as damaged.

    ``is_latest``: it was not asked for by name.
    """

    folder: str = ""
    tag: str = ""
    id: str = ""
    is_latest: bool = False
    passed: list[str] = []

    def is_there(self) -> bool:
        """Whether it is still where it was found."""
        return not self.id or holds(Path(self.folder), self.id)


class Search:
    """Rank 0's search, over the attempts of one load. The other ranks only tell it of failures.

    :attr:`damaged` are those that could not be loaded, by id: another may have their name meanwhile. :attr:`filled` are
    the tensors of models and optimizers that any attempt may have filled, on this rank.
    """

    def __init__(self, request: LoadRequest, timeout: float) -> None:
        """``timeout``: seconds for which checkpoints may come and go faster than they can be loaded."""
        self._request, self._ends = request, time.monotonic() + timeout
        self._failed: tuple[Found, HoldfastError] | None = None
        self._left: HoldfastError | None = None
        self.damaged: dict[str, HoldfastError] = {}
        self.filled: set[tuple[str, str]] = set()

    def failed(self, found: Found, filled: set[tuple[str, str]], error: HoldfastError) -> None:
        """Note why an attempt to load what was found failed, the same on all ranks, and what it has filled."""
        self._failed = found, error
        self.filled |= filled
        if filled and self._left is None:
            self._left = error

    def next(self) -> Found:
        """What to load, or to load instead. Raises the failure where there is nothing else to be tried.

        Where an attempt has left values behind, it is that one's: whatever came after it must not hide it.
        """
        if self._failed is not None:
            self._judge(*self._failed)
        recover(self._request.path)
        return self._look()

    def _judge(self, found: Found, error: HoldfastError) -> None:
        """Return where another attempt may succeed."""
        if not found.is_there():
            if self._left is error:
                self._left = GoneError(f"{found.folder} was replaced or removed while it was loaded: {_said(error)}")
            if self._is_late():
                raise self._too_fast(error) from error
        elif self._falls_back(found, error):
            self.damaged[found.id] = error
        else:
            raise self._left or error

    def _falls_back(self, found: Found, error: HoldfastError) -> bool:
        """Whether there may be another, and it may be loaded instead."""
        if not found.is_latest or self._request.on_damage == "raise":
            return False
        missing = isinstance(error, StorageError) and error.errno == errno.ENOENT
        unfit = isinstance(error, MismatchError) and bool(self.damaged)
        return missing or unfit or isinstance(error, DamagedError)

    def _is_late(self) -> bool:
        return time.monotonic() > self._ends

    def _too_fast(self, error: HoldfastError) -> GoneError:
        return GoneError(
            f"the checkpoints in {self._request.path} are replaced or removed faster than one can be loaded; "
            f"keep more of them: {_said(self._left or error)}"
        )

    def _look(self) -> Found:
        while True:
            try:
                return self._chosen()
            except GoneError as error:
                if self._is_late():
                    raise self._too_fast(error) from error
            except (DamagedError, NoCheckpointError) as error:
                if self._left is None:
                    raise
                raise self._left from error

    def _chosen(self) -> Found:
        """Raises ``NoCheckpointError``, ``StorageError``, or ``DamagedError`` where nobody wants to fall back."""
        path, tag = self._request.path, self._request.tag
        if tag is not None:
            return _named(find(path, tag), tag)
        place = whereabouts(path)
        if is_native(place):
            return _named(place, path.name)
        if is_checkpoint(place):
            return Found(str(place), path.name)
        every = every_checkpoint(path)
        unreadable = [info for info in every if info.status != "complete"]
        if unreadable and self._request.on_damage == "raise":
            kind = DamagedError if unreadable[0].status == "damaged" else FormatError
            raise kind(f"{unreadable[0].problem}; it may be the newest checkpoint: remove it, or name another by tag")
        sound = [info for info in every if info.status == "complete" and info.id not in self.damaged]
        if not sound and self.damaged:
            raise next(iter(self.damaged.values()))
        chosen = sound[-1] if sound else latest(path)
        passed = [info.tag for info in every if info.status != "complete" or info.id in self.damaged]
        return Found(str(chosen.path), chosen.tag, chosen.id, is_latest=True, passed=passed)


def _named(folder: Path, tag: str) -> Found:
    """A checkpoint that was asked for. Raises ``GoneError`` where it goes while it is looked at."""
    try:
        return Found(str(folder), tag, read_manifest(folder).id)
    except NoCheckpointError:
        raise
    except HoldfastError:  # every rank will say so when it reads it
        return Found(str(folder), tag)


def _said(error: HoldfastError) -> str:
    return str(error.args[-1])
