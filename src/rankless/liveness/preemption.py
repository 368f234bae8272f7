"""Preemption: a signal on any rank makes all ranks stop at the same step.

:class:`rankless.Checkpointer` has one on each rank, and asks it at each step in the main thread; a thread next to it
talks to the store. All ranks must stop at the same step, which :mod:`rankless.engine.comm.stop_step` decides.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType
from typing import Any

from rankless.engine.comm.process_group_argument import ProcessGroupArgument
from rankless.engine.comm.session import RankGroup
from rankless.engine.comm.stop_step import StepConsensus
from rankless.errors import InvalidArgumentError, RankFailedError, RankTimeoutError
from rankless.process.exit_order import ExitStage, call_at_exit
from rankless.storage.closing import ClosingMixin

#: Seconds between two polls of the store: a signal on one rank may go unnoticed on the others for as long.
_POLL_INTERVAL = 0.5

#: Seconds that ``close`` waits for the thread, which may itself be waiting for other ranks.
_JOIN_TIMEOUT = 2.0

_log = logging.getLogger("rankless")


def preemption(*signals: int, process_group: ProcessGroupArgument = None, timeout: float = 60.0) -> Preemption:
    """Watch, together with all ranks, for signals that tell the job to end. Every rank must call it.

    ::

        with rankless.preemption(signal.SIGTERM) as stop:
            for step in ...:
                ...
                if stop.requested():
                    rankless.save_checkpoint(...)
                    break

    Args:
        signals: the signals to watch for; ``SIGTERM`` if none is given. Until :meth:`Preemption.close` they have no
            other effect, but a second ``SIGINT`` (Ctrl-C) has its earlier effect.
        process_group: the ranks that stop together; the default group, or this process alone if there is none.
        timeout: seconds that ranks wait for each other, once one has received a signal, before all of them fail.

    Raises:
        InvalidArgumentError: this is not the main thread, which alone may handle signals; or a signal cannot be
            handled.
    """
    return Preemption(signals or (signal.SIGTERM,), RankGroup(process_group), timeout)


class Preemption(ClosingMixin):
    """A request to stop that all ranks agree on: see :func:`preemption`. Usable as a context manager."""

    def __init__(self, signals: Iterable[int], ranks: RankGroup, timeout: float) -> None:
        session = ranks.open_session(timeout)
        self._pid = os.getpid()
        self._received: set[int] = set()
        self._previous: dict[int, Any] = {}
        _install_handler(signals, self._on_signal, self._previous)
        self._closing = threading.Event()
        self._consensus = None if session.store is None else StepConsensus(session, session.store)
        self._thread: threading.Thread | None = None
        if self._consensus is not None:
            self._thread = threading.Thread(
                target=self._watch_store, args=(self._consensus,), name="rankless preemption", daemon=True
            )
            self._thread.start()
            self._at_exit = call_at_exit(ExitStage.WATCHERS, self.close)

    def requested(self) -> bool:
        """Return whether to stop now: true from the same step on, on all ranks. Every rank must call it once a step.

        A call takes less than a microsecond and does not communicate. Once any rank has received a signal, one call on
        each rank may take as long as the ranks need to agree on a step: about a second.

        Raises:
            RankTimeoutError: a rank did not answer in time, after one received a signal.
            RankFailedError: the key-value store of the ranks was lost, after this one received a signal.
        """
        return bool(self._received) if self._consensus is None else self._consensus.count_step()

    def close(self) -> None:
        """Restore the previous signal handlers. After it no rank may call :meth:`requested`."""
        with suppress(ValueError):  # not in the main thread: the handler stays, and has no effect
            for number, previous in self._previous.items():
                self._remove_handler(number, previous)
        self._closing.set()
        if self._thread is not None:
            self._at_exit.cancel()
            self._thread.join(_JOIN_TIMEOUT)

    def _remove_handler(self, number: int, previous: Any) -> None:
        """Restore the handler of before, also if another watcher has installed its own after this one."""
        handler: Any = signal.getsignal(number)
        if handler == self._on_signal:
            signal.signal(number, previous)
        while isinstance(owner := getattr(handler, "__self__", None), Preemption):
            handler = owner._previous.get(number)  # noqa: SLF001 - of the same class
            if handler == self._on_signal:
                owner._previous[number] = previous  # noqa: SLF001
                return

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous[number]
        if os.getpid() != self._pid:  # a forked process, such as a worker: it has nothing to save
            signal.signal(number, previous)
            os.kill(os.getpid(), number)
            return
        if number == signal.SIGINT and number in self._received and callable(previous):
            previous(number, frame)
        self._received.add(number)
        if isinstance(getattr(previous, "__self__", None), Preemption):  # each of several watchers learns of the signal
            previous(number, frame)

    def _watch_store(self, consensus: StepConsensus) -> None:
        """Announce a signal to the other ranks, watch for theirs, and agree with them on a step."""
        while not self._closing.wait(_POLL_INTERVAL):
            try:
                if self._received:
                    consensus.request_stop()
                if consensus.is_stop_requested():
                    consensus.agree_on_step()
                    return
            except (RankFailedError, RankTimeoutError) as error:
                if self._received:  # else training continues: there is nothing to agree on
                    consensus.set_failure(error)
                    return
        with suppress(RankFailedError, RankTimeoutError):
            consensus.leave()


def _install_handler(
    signals: Iterable[int], handler: Callable[[int, FrameType | None], None], previous: dict[int, Any]
) -> None:
    """Install a handler. The previous handlers are stored in ``previous`` first, because the handler looks there."""
    if threading.current_thread() is not threading.main_thread():
        raise InvalidArgumentError("preemption() installs signal handlers: call it in the main thread")
    for number in signals:
        try:
            previous[number] = signal.getsignal(number) or signal.SIG_DFL
            signal.signal(number, handler)
        except (OSError, ValueError, TypeError) as error:
            for installed, old_handler in previous.items():
                with suppress(OSError, ValueError, TypeError):  # the one that cannot be handled
                    signal.signal(installed, old_handler)
            raise InvalidArgumentError(f"the signal {number!r} cannot be handled: {error}") from error
