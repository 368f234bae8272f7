"""Terminal output: escaping of control characters, and a progress bar for operations longer than a second.

Commands print with it, in one process; rank 0 of a save or load shows the bar. Text of checkpoints must be escaped
before it is printed.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Any, NoReturn

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    Task,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from rankless.observe.events import OnProgress, ProgressCounter

#: Seconds before the bar appears.
_BAR_DELAY = 1.0

#: The most characters of the title, so that the line fits into 80 columns.
_TITLE_WIDTH = 25


class _Console(Console):
    """A console that does not end the process if the reader of its output has closed the pipe."""

    def on_broken_pipe(self) -> NoReturn:
        """Raise ``BrokenPipeError``; rich's method would end the process."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def terminal_console(*, stderr: bool = False) -> Console:
    """Return a console that prints text literally: names in a checkpoint may look like markup."""
    return _Console(stderr=stderr, markup=False, highlight=False, emoji=False, soft_wrap=True)


def escape_control_characters(text: str) -> str:
    """Return text from a checkpoint with its non-printable characters, which could control a terminal, escaped.

    For example, a line feed becomes a backslash and ``n``.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class _DoneColumn(DownloadColumn):
    """The bytes done and the total, once the total is known."""

    def render(self, task: Task) -> Text:
        return Text() if task.total is None else super().render(task)


class _RateColumn(TransferSpeedColumn):
    """The bytes per second, once some bytes are done."""

    def render(self, task: Task) -> Text:
        return Text() if task.finished_speed is None and task.speed is None else super().render(task)


@contextmanager
def progress_bar(title: str, total: int | None = None) -> Iterator[OnProgress]:
    """Yield a function to call with the bytes done and the total.

    If stderr is a terminal, it shows a bar with the rate and the time left, which is cleared at the end. Lines that are
    logged meanwhile are written above it.
    """
    err = terminal_console(stderr=True)
    if not err.is_interactive:
        yield lambda _done, _total: None
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(20),
        _DoneColumn(),
        _RateColumn(),
        TimeRemainingColumn(),
    )
    # Output that is redirected to a file or a pipe must not be drawn on the terminal.
    bar = Progress(*columns, console=err, transient=True, redirect_stdout=_is_terminal(sys.stdout))
    task = bar.add_task(escape_control_characters(title)[:_TITLE_WIDTH], total=total)
    # A timer, because the first tensor may take longer than the delay.
    timer = Timer(_BAR_DELAY, bar.start)
    timer.daemon = True
    with _log_above_bar(err):
        timer.start()
        try:
            yield lambda done, total: bar.update(task, completed=done, total=total)
        finally:
            timer.cancel()
            timer.join()
            bar.stop()


@contextmanager
def _log_above_bar(err: Console) -> Iterator[None]:
    """Redirect log lines for a terminal through the console, which writes them above its bar.

    Rich replaces ``sys.stderr``, but log handlers keep the stream that they were created with.
    """
    streams = [(handler, handler.stream) for handler in _stream_handlers() if _is_terminal(handler.stream)]
    for handler, stream in streams:
        handler.setStream(FileProxy(err, stream))
    try:
        yield
    finally:
        for handler, stream in streams:
            handler.setStream(stream)


def _stream_handlers() -> Iterator[logging.StreamHandler[Any]]:
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = (handler for logger in loggers if isinstance(logger, logging.Logger) for handler in logger.handlers)
    return (handler for handler in dict.fromkeys(handlers) if isinstance(handler, logging.StreamHandler))


def _is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal; ``False`` if it is closed."""
    try:
        return stream is not None and bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


@contextmanager
def show_progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar of ``total`` bytes. Yield a function to call with the number of bytes just done."""
    with progress_bar(title, total) as on_progress:
        yield ProgressCounter(total, on_progress).add
