"""The rule of a ``Checkpointer`` for a save that is due and fails: raise the error, or warn and try again later.

:class:`rankless.Checkpointer` has one on each rank, and uses it in the thread of the training. Only rank 0's clock
decides, so that all ranks go on or all raise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Self

import msgspec

from rankless.errors import InvalidArgumentError, StorageError
from rankless.observe.events import Event, OnEvent, Saved
from rankless.observe.warning import warn_caller
from rankless.ondisk.validation import check_choice
from rankless.options import SaveOptions
from rankless.save.cadence import Ask
from rankless.save.deferred_errors import DeferredErrors


class FailureTolerance:
    """The rule for failures, and when something was saved last. ``max_seconds`` is ``None`` if there is no limit."""

    def __init__(self, max_seconds: float | None, *, warns: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_seconds, self._warns, self._clock = max_seconds, warns, clock
        self._durable_at = clock()

    @classmethod
    def of(cls, on_failure: object, max_unsaved: object, *, has_tier: bool) -> Self:
        """Return the rule for the arguments of a ``Checkpointer``. Raises ``InvalidArgumentError``."""
        check_choice("on_failure", on_failure, ("raise", "warn"))
        warns = on_failure == "warn"
        if warns and has_tier:
            raise InvalidArgumentError("with a local tier, pass on_failure and max_undrained_seconds to LocalTier")
        if max_unsaved is None:
            return cls(None, warns=warns)
        if not warns:
            raise InvalidArgumentError('max_unsaved needs on_failure="warn"')
        if not isinstance(max_unsaved, timedelta) or max_unsaved <= timedelta(0):
            raise InvalidArgumentError(f"max_unsaved must be a timedelta above 0; got {max_unsaved!r}")
        return cls(max_unsaved.total_seconds(), warns=warns)

    def describe(self) -> dict[str, str]:
        """Return the arguments as text: all ranks must have the same, or some would wait for others.

        For example, ``on_failure`` is ``warn``.
        """
        return {"on_failure": "warn" if self._warns else "raise", "max_unsaved": repr(self._max_seconds)}

    def note_durable(self) -> None:
        """Note that all is saved now: a checkpoint is durable, or was loaded. On any rank, from any thread."""
        self._durable_at = self._clock()

    def listen_in(self, options: SaveOptions) -> SaveOptions:
        """Return options of saves with a listener that also notes which saves are durable.

        A :class:`rankless.Checkpointer` calls it on each rank when it is made.
        """
        if not self._warns:
            return options
        on_event: OnEvent | None = options.on_event

        def listen(event: Event) -> None:
            if isinstance(event, Saved):
                self.note_durable()
            if on_event is not None:
                on_event(event)

        return replace(options, on_event=listen)

    @contextmanager
    def tolerating(self, name: str, ask: Ask) -> Iterator[None]:
        """Run a save that is due. If storage fails, warn instead, as long as that is allowed by the clock of rank 0.

        All ranks have the same error, and meet for the decision.

        A step of a :class:`rankless.Checkpointer` enters it around a save that is due.
        """
        try:
            yield
        except StorageError as error:
            seconds = self._seconds_unsaved(ask) if self._warns else 0.0
            if self._max_seconds is not None and seconds > self._max_seconds:
                error.add_note(f"nothing was saved for {seconds:.0f} s, which is longer than max_unsaved")
                raise
            if not self._warns:
                raise
            warn_caller(f"{name} or the save before it has failed, and nothing was saved for {seconds:.0f} s: {error}")

    def _seconds_unsaved(self, ask: Ask) -> float:
        raw = ask(lambda: msgspec.msgpack.encode(self._clock() - self._durable_at))
        return msgspec.msgpack.decode(raw, type=float)

    def warn_instead(self, failures: DeferredErrors) -> None:
        """Warn of the failures of storage at the end of a block, if its last step is saved: they need not be raised.

        A :class:`rankless.Checkpointer` calls it on each rank at the end of its block.
        """
        if self._warns:
            failures.warn_of(StorageError)
