"""The process that a command runs in: its standard streams, the signals that end it, and its exit code.

:mod:`rankless.cli.main` sets the process up with it, and commands guard slow imports. An incomplete output must be
removed if a signal ends the process.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

#: A handler of a signal.
Handler = Callable[[int, FrameType | None], Any] | signal.Handlers

#: Shells report a program that was ended by a signal as this number plus the signal's.
_SIGNAL_BASE = 128

#: Exit codes: interrupted by Ctrl-C; the reader of the output closed the pipe.
INTERRUPTED, OUTPUT_CLOSED = _SIGNAL_BASE + signal.SIGINT, _SIGNAL_BASE + signal.SIGPIPE

#: Signals that end a process without time to remove incomplete output, unless they are handled.
_ENDING = (signal.SIGTERM, signal.SIGHUP)


def open_missing_streams() -> None:
    """Open ``/dev/null`` for each standard stream that the caller has closed.

    Otherwise the next file that is opened would get that stream's number, and printed text would go into a checkpoint.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def discard_output() -> None:
    """Discard output that is still buffered, so that nothing fails at the end of the process."""
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
    """End the process at once on Ctrl-C. This is for imports, when there is nothing to clean up yet.

    An interrupted import may raise any exception instead of ``KeyboardInterrupt``.
    """
    with _signal_handler(signal.SIGINT, _exit_at_once, instead_of=signal.default_int_handler):
        yield


@contextmanager
def raise_on_interrupt() -> Iterator[None]:
    """Let Ctrl-C raise ``KeyboardInterrupt`` again inside :func:`leave_on_interrupt`."""
    with _signal_handler(signal.SIGINT, signal.default_int_handler, instead_of=_exit_at_once):
        yield


@contextmanager
def unwind_on_signals() -> Iterator[None]:
    """Let the signals that end the process raise ``SystemExit``, so that incomplete output is removed."""
    with ExitStack() as stack:
        for number in _ENDING:
            stack.enter_context(_signal_handler(number, _raise_exit, instead_of=signal.SIG_DFL))
        yield


def ignore_interrupt() -> None:
    """Ignore Ctrl-C from now on: the work is done, and the exit code is final."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def _signal_handler(number: signal.Signals, handler: Handler, *, instead_of: Handler) -> Iterator[None]:
    """Replace the handler of a signal if it is ``instead_of``. One that is ignored, for example by ``nohup``, stays."""
    # Only the main thread may set handlers.
    is_replaced = threading.current_thread() is threading.main_thread() and signal.getsignal(number) is instead_of
    try:
        if is_replaced:
            signal.signal(number, handler)
        yield
    finally:
        if is_replaced:
            signal.signal(number, instead_of)


def _exit_at_once(_number: int, _frame: FrameType | None) -> NoReturn:
    os.write(2, b"error: interrupted\n")
    os._exit(INTERRUPTED)


def _raise_exit(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(_SIGNAL_BASE + number)
