"""Reports of one save or load: to Python's ``logging``, to a listener, and on a terminal.

Each save, load and drain has an :class:`EventReporter` on each rank, and calls it in its own thread. An error of a
listener must not reach the operation: it would fail on one rank alone.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal
from weakref import WeakMethod

from rankless.observe.events import (
    DrainFailed,
    Event,
    Loaded,
    OnEvent,
    Progress,
    ProgressCounter,
    Saved,
    SavedLocally,
    SaveFailed,
    SavePhase,
)
from rankless.observe.spans import traced
from rankless.observe.units import format_rate, format_seconds, format_size

_log = logging.getLogger("rankless")


def log_reasons(reasons: Iterable[str]) -> None:
    """Log reasons that are too long for a warning."""
    for reason in reasons:
        _log.info("%s", reason)


def note_corrupt(path: Path, hidden: Path) -> None:
    """Log that a checkpoint that a load found corrupt is hidden: by its name, or in an object store by no pointer.

    The output of a save calls it on rank 0, after the commit.
    """
    _log.warning("a corrupt checkpoint in %s is kept as %s; rankless prune --leftovers removes it", path, hidden.name)


class EventReporter:
    """The reporter of one save into ``path`` or load from it. It ``began`` at a time of ``time.perf_counter``.

    ``on_event`` is a method of the operation that owns the reporter. The reporter does not keep the operation alive:
    in a cycle, the memory of a save would wait for the garbage collector, which many trainings turn off.
    An exception of the listener is logged and does not affect the save or load.
    """

    def __init__(self, path: Path, on_event: OnEvent, *, is_coordinator: bool, began: float) -> None:
        self._path, self._on_event, self._began = path, WeakMethod(on_event), began
        # One rank's line is enough: thousands would log the same.
        self._level = logging.INFO if is_coordinator else logging.DEBUG
        self._blocking_seconds: float | None = None
        self._replica_check_seconds = 0.0
        self._phases: dict[SavePhase, float] = {}
        self._phase: SavePhase = "prepare"
        self._phase_began = 0.0

    def elapsed_seconds(self) -> float:
        """Return the seconds since the call."""
        return time.perf_counter() - self._began

    def mark_returned(self) -> float:
        """Note that the call returns to its caller. Return the seconds that it has blocked."""
        self._blocking_seconds = self.elapsed_seconds()
        return self._blocking_seconds

    def begin_phase(self, phase: SavePhase) -> None:
        """Begin a phase of a save, which ends the one before. A save begins with ``prepare``.

        The thread of the save calls it, on each rank.
        """
        self._end_phase(self.elapsed_seconds())
        self._phase = phase

    def _end_phase(self, now: float) -> None:
        self._phases[self._phase] = self._phases.get(self._phase, 0.0) + now - self._phase_began
        self._phase_began = now

    def record_replica_check(self, seconds: float) -> None:
        """Note for how many seconds this rank hashed replicated tensors."""
        self._replica_check_seconds = seconds

    def progress_counter(self, action: Literal["save", "load"], total: int) -> ProgressCounter:
        """Return a counter that reports the moved bytes as events."""
        return ProgressCounter(total, lambda done, total: self._notify(Progress(action, self._path, done, total)))

    @traced("report", "report")
    def report_saved(self, path: Path, step: float | None, nbytes: int, shared_nbytes: int) -> None:
        """Report that the checkpoint at ``path`` is durable.

        Its tensors take ``nbytes`` bytes: ``shared_nbytes`` of these were not written.

        A save or drain calls it on each rank, in its thread, after the commit.
        """
        seconds = self.elapsed_seconds()
        self._end_phase(seconds)
        blocking = seconds if self._blocking_seconds is None else self._blocking_seconds
        checked, phases = self._replica_check_seconds, dict(self._phases)
        event = Saved(path, step, nbytes, seconds, blocking, checked, shared_nbytes, phases)
        waited = format_seconds(blocking)
        if self._replica_check_seconds:
            waited += f" ({format_seconds(self._replica_check_seconds)} of that for comparing replicas)"
        shared = f", and {format_size(shared_nbytes)} shared with the checkpoint before" if shared_nbytes else ""
        note = "saved %s: %s%s, of which the caller waited %s"
        _log.log(self._level, note, path, _format_transfer(nbytes - shared_nbytes, seconds), shared, waited)
        self._notify(event)

    def report_saved_locally(self, path: Path, step: float | None, nbytes: int) -> None:
        """Report that the checkpoint is complete in the local tier.

        A save into the tier calls it on each rank, in its thread.
        """
        seconds = self.elapsed_seconds()
        _log.log(self._level, "saved %s in the local tier: %s", path, _format_transfer(nbytes, seconds))
        self._notify(SavedLocally(path, step, nbytes, seconds))

    def report_drain_failed(self, error: BaseException, attempt: int, undrained_seconds: float) -> None:
        """Report that a checkpoint of the local tier could not be written into the run directory.

        A drain calls it on each rank, in its thread, after each attempt that failed.
        """
        level = logging.WARNING if self._level == logging.INFO else logging.DEBUG
        note = "attempt %d to write %s failed; nothing was written for %s: %s"
        _log.log(level, note, attempt, self._path, format_seconds(undrained_seconds), error)
        self._notify(DrainFailed(self._path, error, attempt, undrained_seconds))

    def report_failed(self, error: BaseException) -> None:
        """Report that the save failed and left no files. It is logged only if the call has already returned.

        The rollback of a save calls it, on each rank.
        """
        if self._blocking_seconds is not None:
            _log.error("the save of %s failed: %s", self._path, error)
        self._notify(SaveFailed(self._path, error))

    def report_unread(self, path: Path, values: Sequence[tuple[str, str, str]]) -> None:
        """Report values that rankless does not read: ``(group, name, reason)``; a placeholder is returned instead."""
        level = logging.WARNING if self._level == logging.INFO else logging.DEBUG
        for group, name, reason in values:
            _log.log(level, "%s: %s value %s %s; a placeholder object is returned instead", path, group, name, reason)

    def report_not_requested(self, path: Path, components: Sequence[str]) -> None:
        """Report the components that the checkpoint has and that nothing was passed for."""
        if components:
            _log.log(self._level, "%s also has, and nothing was passed for: %s", path, ", ".join(components))

    @traced("report", "report")
    def report_loaded(
        self, path: Path, step: float | None, nbytes: int, *, verified: bool, is_part: bool = False
    ) -> None:
        """Report that a load is complete; this rank has read ``nbytes`` bytes. ``is_part``: it has no model."""
        event = Loaded(path, step, nbytes, self.elapsed_seconds(), verified)
        _log.log(
            logging.DEBUG if is_part else self._level,
            "loaded %s: %s",
            path,
            _format_transfer(nbytes, event.seconds, suffix=" a rank"),
        )
        self._notify(event)

    def _notify(self, event: Event) -> None:
        if (on_event := self._on_event()) is not None:
            notify_listener(on_event, event, self._path)


def notify_listener(on_event: OnEvent, event: Event, path: Path) -> None:
    """Call a listener. Log the errors that it raises.

    Any thread calls it.
    """
    try:
        on_event(event)
    except Exception:  # noqa: BLE001 - a listener may do anything
        _log.exception("a listener to events of %s raised", path)


def _format_transfer(nbytes: int, seconds: float, suffix: str = "") -> str:
    return f"{format_size(nbytes)} in {format_seconds(seconds)} ({format_rate(nbytes, seconds)}{suffix})"


@contextmanager
def with_progress_bar(title: str, on_event: OnEvent) -> Iterator[OnEvent]:
    """Yield a listener that also drives a progress bar, if stderr is a terminal.

    The bar appears after a second.

    Rank 0 enters it in the thread of the caller, around a synchronous save or a load.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield on_event
        return
    from rankless.observe.terminal import progress_bar  # noqa: PLC0415 - rich, needed only with a terminal

    with progress_bar(title) as show_progress:

        def show_and_forward(event: Event) -> None:
            if isinstance(event, Progress):
                show_progress(event.done, event.total)
            on_event(event)

        yield show_and_forward
