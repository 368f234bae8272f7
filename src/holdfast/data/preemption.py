"""Stopping when the job is told to: a signal on any rank, and all ranks stop at the same step."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType
from typing import Any

import torch.distributed as dist

from holdfast.engine.comm.session import RankGroup
from holdfast.engine.comm.step_sync import StepConsensus
from holdfast.errors import InvalidArgumentError, RankFailedError, RankTimeoutError
from holdfast.process.exit_order import ExitStage, call_at_exit
from holdfast.storage.closing import ClosingMixin

#: Seconds between a rank's looks at the store, and so for how long a signal may go unnoticed on the others.
_INTERVAL = 0.5

#: Seconds that closing waits for the thread, which may be waiting for other ranks.
_PARTING = 2.0

_log = logging.getLogger("holdfast")


def preemption(*signals: int, process_group: dist.ProcessGroup | None = None, timeout: float = 60.0) -> Preemption:
    """Take notice of signals that tell the job to end, together with all ranks. Every rank calls it.

    ::

        with holdfast.preemption(signal.SIGTERM) as stop:
            for step in ...:
                ...
                if stop.requested():
                    holdfast.save_checkpoint(...)
                    break

    Args:
        signals: those to take notice of; ``SIGTERM`` when none is given. Until :meth:`Preemption.close` they do nothing
            else. A second ``SIGINT`` (Ctrl-C) does what it did before.
        process_group: the ranks that stop together; the default group, or this process alone where there is none.
        timeout: seconds that ranks wait for each other, once one was told to stop, before all of them fail.

    Raises:
        InvalidArgumentError: this is not the main thread, which alone may handle signals; or one cannot be handled.
    """
    return Preemption(signals or (signal.SIGTERM,), RankGroup(process_group), timeout)


class Preemption(ClosingMixin):
    """Whether the ranks were told to stop: see :func:`preemption`. Usable as a context manager."""

    def __init__(self, signals: Iterable[int], ranks: RankGroup, timeout: float) -> None:
        session = ranks.session(timeout)
        self._process = os.getpid()
        self._told: set[int] = set()
        self._previous: dict[int, Any] = {}
        _deactivate(signals, self._take, self._previous)
        self._closing = threading.Event()
        self._calls = None if session.store is None else StepConsensus(session, session.store)
        self._thread: threading.Thread | None = None
        if self._calls is not None:
            self._thread = threading.Thread(
                target=self._watch, args=(self._calls,), name="holdfast preemption", daemon=True
            )
            self._thread.start()
            self._at_exit = call_at_exit(ExitStage.WATCHERS, self.close)

    def requested(self) -> bool:
        """Whether to stop now: true from the same call on, on all ranks. Every rank calls it once a step.

        It costs less than a microsecond, and talks to nobody. Once any rank was told to stop, one call on each rank
        may take as long as the ranks need to agree on a step: about a second.

        Raises:
            RankTimeoutError: a rank did not answer in time, when one was told to stop.
            RankFailedError: the key-value store of the ranks was lost, when this one was told to stop.
        """
        return bool(self._told) if self._calls is None else self._calls.arrive()

    def close(self) -> None:
        """Give the signals back to whoever had them. All ranks make no more calls."""
        with suppress(ValueError):  # not in the main thread: the handler stays, and does nothing
            for number, previous in self._previous.items():
                signal.signal(number, previous)
        self._closing.set()
        if self._thread is not None:
            self._at_exit.cancel()
            self._thread.join(_PARTING)

    def _take(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous[number]
        if os.getpid() != self._process:  # forked meanwhile, as a worker: it has nothing to save
            signal.signal(number, previous)
            os.kill(os.getpid(), number)
            return
        if number == signal.SIGINT and number in self._told and callable(previous):
            previous(number, frame)
        self._told.add(number)

    def _watch(self, calls: StepConsensus) -> None:
        """Tell the other ranks, listen to them, and agree with them on a step."""
        while not self._closing.wait(_INTERVAL):
            try:
                if self._told:
                    calls.ask()
                if calls.is_asked():
                    calls.choose()
                    return
            except (RankFailedError, RankTimeoutError) as error:
                if self._told:  # else the training goes on: there is nothing to agree about
                    calls.fail(error)
                    return
        with suppress(RankFailedError, RankTimeoutError):
            calls.leave()


def _deactivate(
    signals: Iterable[int], handler: Callable[[int, FrameType | None], None], previous: dict[int, Any]
) -> None:
    """Install a handler. What had the signals before goes into ``previous``, before the handler may look there."""
    if threading.current_thread() is not threading.main_thread():
        raise InvalidArgumentError("preemption() handles signals: call it in the main thread")
    for number in signals:
        try:
            previous[number] = signal.getsignal(number) or signal.SIG_DFL
            signal.signal(number, handler)
        except (OSError, ValueError, TypeError) as error:
            for done, before in previous.items():
                with suppress(OSError, ValueError, TypeError):  # the one that cannot be handled
                    signal.signal(done, before)
            raise InvalidArgumentError(f"the signal {number!r} cannot be handled: {error}") from error
