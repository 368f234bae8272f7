"""What is told of one save or load: to Python's ``logging``, to who listens, and on a terminal."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from holdfast.observe.events import Event, Loaded, OnEvent, Progress, ProgressCounter, Saved, SaveFailed
from holdfast.observe.units import format_rate, format_seconds, format_size

_log = logging.getLogger("holdfast")


def log_reasons(reasons: Iterable[str]) -> None:
    """Log what a warning has no room for."""
    for reason in reasons:
        _log.info("%s", reason)


def note_corrupt(path: Path, hidden: Path) -> None:
    """Log that a checkpoint which a load found corrupt has lost its name."""
    _log.warning("a corrupt checkpoint in %s is hidden now, as %s; prune --leftovers removes it", path, hidden.name)


class EventReporter:
    """One save or load into or from ``path``, that ``began`` at a time of ``time.perf_counter``.

    A listener that raises is logged, and harms nothing.
    """

    def __init__(self, path: Path, on_event: OnEvent, *, is_leader: bool, began: float) -> None:
        self._path, self._on_event, self._began = path, on_event, began
        # One rank's word is enough where thousands would say the same.
        self._level = logging.INFO if is_leader else logging.DEBUG
        self._stall: float | None = None
        self._replica_check = 0.0

    def seconds(self) -> float:
        """How long it has taken until now."""
        return time.perf_counter() - self._began

    def returned(self) -> float:
        """The caller is let go. Returns for how many seconds it was kept."""
        self._stall = self.seconds()
        return self._stall

    def compared(self, seconds: float) -> None:
        """What other ranks hold too was hashed here, which took so many seconds."""
        self._replica_check = seconds

    def moving(self, action: Literal["save", "load"], total: int) -> ProgressCounter:
        """What is to be told the bytes as they are moved."""
        return ProgressCounter(total, lambda done, total: self._tell(Progress(action, self._path, done, total)))

    def saved(self, path: Path, step: float | None, nbytes: int) -> None:
        """Report that the checkpoint at ``path`` is durable; its tensors take ``nbytes`` bytes."""
        seconds = self.seconds()
        stall = seconds if self._stall is None else self._stall
        event = Saved(path, step, nbytes, seconds, stall, self._replica_check)
        waited = format_seconds(stall)
        if self._replica_check:
            waited += f" ({format_seconds(self._replica_check)} of that for comparing replicas)"
        note = "saved %s: %s, of which the caller waited %s"
        _log.log(self._level, note, path, _moved(nbytes, seconds), waited)
        self._tell(event)

    def failed(self, error: BaseException) -> None:
        """Nothing is left of it. Who is still in the call gets the error itself."""
        if self._stall is not None:
            _log.error("the save of %s failed: %s", self._path, error)
        self._tell(SaveFailed(self._path, error))

    def not_read(self, path: Path, values: Sequence[tuple[str, str, str]]) -> None:
        """Report values that holdfast does not read: ``(group, name, reason)``; a placeholder is returned instead."""
        level = logging.WARNING if self._level == logging.INFO else logging.DEBUG
        for group, name, reason in values:
            _log.log(level, "%s: %s value %s %s; an object that says so is in its place", path, group, name, reason)

    def loaded(self, path: Path, step: float | None, nbytes: int, *, verified: bool) -> None:
        """Report that a load is complete; this rank has read ``nbytes`` bytes."""
        event = Loaded(path, step, nbytes, self.seconds(), verified)
        _log.log(self._level, "loaded %s: %s", path, _moved(nbytes, event.seconds, of=" a rank"))
        self._tell(event)

    def _tell(self, event: Event) -> None:
        try:
            self._on_event(event)
        except Exception:  # noqa: BLE001 - a listener may do anything
            _log.exception("a listener to events of %s raised", self._path)


def _moved(nbytes: int, seconds: float, of: str = "") -> str:
    return f"{format_size(nbytes)} in {format_seconds(seconds)} ({format_rate(nbytes, seconds)}{of})"


@contextmanager
def with_progress_bar(what: str, on_event: OnEvent) -> Iterator[OnEvent]:
    """A progress bar beside the listener, where stderr is a terminal and it takes longer than a second."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield on_event
        return
    from holdfast.observe.terminal import progress_bar  # noqa: PLC0415 - rich, which jobs without a terminal need not import

    with progress_bar(what) as show:

        def both(event: Event) -> None:
            if isinstance(event, Progress):
                show(event.done, event.total)
            on_event(event)

        yield both
