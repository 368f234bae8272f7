"""Terminals: text that cannot steer them, and a progress bar for what takes longer than a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from holdfast.events import Meter, Show

#: Seconds before the bar appears.
_PATIENCE = 1.0

#: The most characters of what the bar is about: the line fits into 80 columns.
_WIDEST = 25


def console(*, stderr: bool = False) -> Console:
    """A console that prints text as it is: names in a checkpoint may look like markup."""
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, soft_wrap=True)


def clean(text: str) -> str:
    """Text from a checkpoint with what could steer a terminal escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@contextmanager
def bar(what: str) -> Iterator[Show]:
    """Gives a function to call with what is done, and all there is to do, in bytes.

    The bar is on stderr where that is a terminal, has rate and time left, and is gone at the end.
    """
    err = console(stderr=True)
    if not err.is_interactive:
        yield lambda _done, _total: None
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(20),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    shown = Progress(*columns, console=err, transient=True)
    task = shown.add_task(clean(what)[:_WIDEST], total=None)
    # A timer, as the first tensor may be the one that takes long.
    timer = Timer(_PATIENCE, shown.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda done, total: shown.update(task, completed=done, total=total)
    finally:
        timer.cancel()
        timer.join()
        shown.stop()


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """The same, where ``total`` is known before. Gives a function to call with the bytes that were done just now."""
    with bar(what) as show:
        yield Meter(total, show).add
