"""Terminals: text that cannot steer them, and a progress bar for what takes longer than a second."""

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

from holdfast.observe.events import ProgressCounter, Show

#: Seconds before the bar appears.
_PATIENCE = 1.0

#: The most characters of what the bar is about: the line fits into 80 columns.
_WIDEST = 25


class _Console(Console):
    """A console that leaves the process to its caller, also if whoever reads its output went away."""

    def on_broken_pipe(self) -> NoReturn:
        """Raise what rich would end the process for."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def terminal_console(*, stderr: bool = False) -> Console:
    """A console that prints text as it is: names in a checkpoint may look like markup."""
    return _Console(stderr=stderr, markup=False, highlight=False, emoji=False, soft_wrap=True)


def escape_control_characters(text: str) -> str:
    """Text from a checkpoint with what could steer a terminal escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class _Done(DownloadColumn):
    """What is done of all there is, once that is known."""

    def render(self, task: Task) -> Text:
        return Text() if task.total is None else super().render(task)


class _Rate(TransferSpeedColumn):
    """Bytes per second, once something is done."""

    def render(self, task: Task) -> Text:
        return Text() if task.finished_speed is None and task.speed is None else super().render(task)


@contextmanager
def progress_bar(what: str, total: int | None = None) -> Iterator[Show]:
    """Give a function to call with what is done, and all there is to do, in bytes.

    The bar is on stderr if that is a terminal, has rate and time left, and is gone at the end. Lines that are logged
    meanwhile are written above it.
    """
    err = terminal_console(stderr=True)
    if not err.is_interactive:
        yield lambda _done, _total: None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(20), _Done(), _Rate(), TimeRemainingColumn())
    # What is printed into a file or a pipe stays there.
    shown = Progress(*columns, console=err, transient=True, redirect_stdout=_is_terminal(sys.stdout))
    task = shown.add_task(escape_control_characters(what)[:_WIDEST], total=total)
    # A timer, as the first tensor may be the one that takes long.
    timer = Timer(_PATIENCE, shown.start)
    timer.daemon = True
    with _logged_above(err):
        timer.start()
        try:
            yield lambda done, total: shown.update(task, completed=done, total=total)
        finally:
            timer.cancel()
            timer.join()
            shown.stop()


@contextmanager
def _logged_above(err: Console) -> Iterator[None]:
    """Send log lines that go to a terminal through the console, which writes them above the bar that it draws.

    Handlers keep the stream that they were made with: rich, which stands in for ``sys.stderr``, does not see it.
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
    return (one for one in dict.fromkeys(handlers) if isinstance(one, logging.StreamHandler))


def _is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal; one that is closed is none."""
    try:
        return stream is not None and bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


@contextmanager
def show_progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """The same, if ``total`` is known before. Gives a function to call with the bytes that were done just now."""
    with progress_bar(what, total) as show:
        yield ProgressCounter(total, show).add
