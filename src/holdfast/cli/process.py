"""The process that a command runs in: its standard streams, the signals that end it, and its exit code."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

#: What is done about a signal.
Handler = Callable[[int, FrameType | None], Any] | signal.Handlers

#: What shells give for a program that a signal has ended: this, and the signal's number.
_BY_SIGNAL = 128

#: Exit codes: it was interrupted by Ctrl-C; whoever reads its output went away.
INTERRUPTED, UNREAD = _BY_SIGNAL + signal.SIGINT, _BY_SIGNAL + signal.SIGPIPE

#: Signals that end a process, and by themselves leave no time to remove what is half written.
_ENDING = (signal.SIGTERM, signal.SIGHUP)


def open_missing_streams() -> None:
    """Open ``/dev/null`` in the place of standard streams that the caller has closed.

    Else the next file that is opened has such a stream's number, and what is printed goes into a checkpoint.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def discard_output() -> None:
    """Let what is still to be printed go nowhere, so that nothing fails at the end of the process."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(null, stream.fileno())
            with suppress(OSError):
                stream.flush()
    os.close(null)


@contextmanager
def leave_on_interrupt() -> Iterator[None]:
    """End the process at once on Ctrl-C. For imports: there is nothing to clean up yet.

    A module whose import is interrupted may raise anything instead of ``KeyboardInterrupt``.
    """
    with _handler(signal.SIGINT, _leave, instead_of=signal.default_int_handler):
        yield


@contextmanager
def raise_on_interrupt() -> Iterator[None]:
    """Let Ctrl-C raise ``KeyboardInterrupt`` again, inside of :func:`leave_on_interrupt`."""
    with _handler(signal.SIGINT, signal.default_int_handler, instead_of=_leave):
        yield


@contextmanager
def unwind_on_signals() -> Iterator[None]:
    """Let the signals that end the process raise ``SystemExit``, so that what is half written is removed."""
    with ExitStack() as stack:
        for number in _ENDING:
            stack.enter_context(_handler(number, _unwind, instead_of=signal.SIG_DFL))
        yield


def ignore_interrupt() -> None:
    """Ignore Ctrl-C from here on: the work is done, and its exit code stands."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def _handler(number: signal.Signals, handler: Handler, *, instead_of: Handler) -> Iterator[None]:
    """Handle a signal otherwise, if it was handled as expected: whoever ignores one has a reason, such as ``nohup``."""
    # Only the main thread may.
    is_ours = threading.current_thread() is threading.main_thread() and signal.getsignal(number) is instead_of
    try:
        if is_ours:
            signal.signal(number, handler)
        yield
    finally:
        if is_ours:
            signal.signal(number, instead_of)


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    os.write(2, b"error: interrupted\n")
    os._exit(INTERRUPTED)


def _unwind(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(_BY_SIGNAL + number)
