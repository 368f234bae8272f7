"""Events of saves, loads and conversions, and the types of their listeners.

:class:`~rankless.observe.reporter.EventReporter` makes events on each rank. Users have listeners: fields must keep
their names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Literal

#: A phase of a save. See :class:`Saved`.
SavePhase = Literal["prepare", "copy", "replicate", "write", "commit"]


@dataclass(frozen=True, slots=True)
class Progress:
    """``done`` of the ``total`` bytes that this rank moves. Reported every few megabytes, from any thread."""

    action: Literal["save", "load", "convert"]
    path: Path
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint of ``nbytes`` is complete and durable. An asynchronous save reports this from its own thread.

    ``seconds`` have passed since the call, which blocked its caller for ``blocking_seconds`` of them. This rank hashed
    replicated tensors, to compare them with other ranks, for ``replica_check_seconds`` of those. Of ``nbytes``,
    ``shared_nbytes`` were not written: the checkpoint shares them with the one before. For example, ``phases`` may be
    ``{"prepare": 0.1, "copy": 0.4, "write": 2.0, "commit": 0.1}``.

    ``phases`` has the seconds of each phase on this rank, in order; together they are ``seconds``. ``prepare``: the
    state is captured and the save is planned; ``copy``: tensors are copied, in an asynchronous save; ``replicate``: a
    local tier sends copies to other hosts; ``write``: bytes are written or sent, and other ranks are waited for;
    ``commit``: rank 0 makes the checkpoint visible, which other ranks count as ``write``.
    """

    path: Path
    step: float | None
    nbytes: int
    seconds: float
    blocking_seconds: float
    replica_check_seconds: float = 0.0
    shared_nbytes: int = 0
    phases: Mapping[SavePhase, float] = field(default_factory=dict)

    @property
    def gigabytes_per_second(self) -> float:
        """The rate at which all ranks together wrote, from the call until all bytes are durable."""
        return (self.nbytes - self.shared_nbytes) / self.seconds / 1e9


@dataclass(frozen=True, slots=True)
class SavedLocally:
    """A checkpoint of ``nbytes`` is complete in the local tier, ``seconds`` after the call.

    It is not in the run directory yet, or will never be.
    """

    path: Path
    step: float | None
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DrainFailed:
    """A checkpoint of the local tier could not be written into the run directory, in attempt number ``attempt``.

    Nothing was written there for ``undrained_seconds``.
    """

    path: Path
    error: BaseException
    attempt: int
    undrained_seconds: float


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """A save failed. It left no files; all ranks raise ``error``."""

    path: Path
    error: BaseException


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint was loaded in ``seconds``. This rank read ``nbytes`` of tensors."""

    path: Path
    step: float | None
    nbytes: int
    seconds: float
    verified: bool

    @property
    def gigabytes_per_second(self) -> float:
        """The rate of this rank, from the call until all values are in place."""
        return self.nbytes / self.seconds / 1e9


#: Any event.
Event = Progress | Saved | SavedLocally | DrainFailed | SaveFailed | Loaded

#: A listener to events. It is called on every rank, and from any thread.
OnEvent = Callable[[Event], None]

#: A function that is called with the bytes done so far and the total.
OnProgress = Callable[[int, int], None]


def ignore_event(event: Event) -> None:
    """Ignore an event; the default listener."""
    del event


class ProgressCounter:
    """A counter of the bytes that several threads have moved."""

    def __init__(self, total: int, on_progress: OnProgress) -> None:
        self.total, self._on_progress = total, on_progress
        self._done, self._lock = 0, Lock()

    def add(self, nbytes: int) -> None:
        """Add ``nbytes`` to the bytes done, and report the sum."""
        with self._lock:
            self._done += nbytes
            self._on_progress(self._done, self.total)
