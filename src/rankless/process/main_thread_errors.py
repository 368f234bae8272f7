"""Errors that another thread raises in the main thread, with a signal.

The signal ends ``time.sleep``, waits for a lock and other calls of Python that wait. A call of native code goes on, and
the error is raised at the first Python instruction after it. ``SIGURG`` is used: its default action is to do nothing,
so it does no harm in child processes, and hardly any program uses it.

:func:`rankless.watch` makes it in the main thread, and :mod:`rankless.liveness.rank_loss_reaction` raises with it in
the watching thread.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from types import FrameType
from typing import Any

_SIGNAL = signal.SIGURG


class MainThread:
    """The main thread of this process. Make it there."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._pending: BaseException | None = None
        #: Set when an error has been raised.
        self.has_raised = threading.Event()
        self._previous: Any = signal.getsignal(_SIGNAL) or signal.SIG_DFL
        signal.signal(_SIGNAL, self._on_signal)

    def raise_error(self, error: BaseException) -> None:
        """Raise an error in the main thread as soon as it executes Python code. Call it in another thread."""
        self._pending = error
        with suppress(OSError):  # the main thread has ended
            signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)

    def cancel(self) -> None:
        """Raise no error any more."""
        self._pending = None

    def close(self) -> None:
        """Raise no error any more, and restore the previous handler."""
        self.cancel()
        with suppress(ValueError):  # not in the main thread: the handler stays, and has no effect
            if signal.getsignal(_SIGNAL) == self._on_signal:
                signal.signal(_SIGNAL, self._previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        error, self._pending = self._pending, None
        if error is None or os.getpid() != self._pid:
            if callable(self._previous):
                self._previous(number, frame)
            return
        self.has_raised.set()
        raise error


def describe_position() -> str:
    """Describe the line of code that the main thread executes. For example, ``train.py:12, main``."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 - documented
    if frame is None:
        return "an unknown place"
    last = traceback.extract_stack(frame, limit=1)[-1]
    return f"{last.filename}:{last.lineno}, {last.name}"
