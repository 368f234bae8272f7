"""What happens in saves, loads and conversions, told as it happens: small records, and who listens to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Literal


@dataclass(frozen=True, slots=True)
class Progress:
    """``done`` of the ``total`` bytes that this rank moves, so far. Told for every few megabytes, from any thread."""

    action: Literal["save", "load", "convert"]
    path: Path
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint of ``nbytes`` is complete and durable. Of asynchronous saves this is told from their own thread.

    ``seconds`` have passed since the call; for ``blocking_seconds`` of them the call kept its caller. This rank has
    hashed what other ranks hold too for ``replica_check_seconds`` of those.
    """

    path: Path
    step: float | None
    nbytes: int
    seconds: float
    blocking_seconds: float
    replica_check_seconds: float = 0.0

    @property
    def gigabytes_per_second(self) -> float:
        """Of all ranks together, from the call until all is durable."""
        return self.nbytes / self.seconds / 1e9


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """Nothing is left of a save, but for the error that all ranks raise."""

    path: Path
    error: BaseException


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint has been loaded. This rank has read ``nbytes`` of tensors, after ``seconds`` all were in place."""

    path: Path
    step: float | None
    nbytes: int
    seconds: float
    verified: bool

    @property
    def gigabytes_per_second(self) -> float:
        """Of this rank, from the call until all is in place."""
        return self.nbytes / self.seconds / 1e9


#: Anything that is told.
Event = Progress | Saved | SaveFailed | Loaded

#: Who listens. On every rank, and from any thread.
OnEvent = Callable[[Event], None]

#: Is told the bytes done so far, and all there are.
Show = Callable[[int, int], None]


def ignore_event(event: Event) -> None:
    """Nobody listens."""
    del event


class ProgressCounter:
    """Adds up what several threads have done."""

    def __init__(self, total: int, show: Show) -> None:
        self.total, self._show = total, show
        self._done, self._lock = 0, Lock()

    def add(self, nbytes: int) -> None:
        """So many bytes more were done."""
        with self._lock:
            self._done += nbytes
            self._show(self._done, self.total)
