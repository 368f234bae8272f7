"""A progress bar for what takes longer than a second, where somebody looks on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from holdfast.cli.output import clean, console

#: Seconds before the bar appears.
_PATIENCE = 1.0

#: The most characters of what the bar is about: the line fits into 80 columns.
_WIDEST = 25


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Gives a function to call with the bytes that were done. The bar is on stderr, and gone at the end."""
    err = console(stderr=True)
    if not err.is_interactive:
        yield lambda _: None
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(20),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=err, transient=True)
    task = bar.add_task(clean(what)[:_WIDEST], total=total)
    # A timer, as the first tensor may be the one that takes long.
    timer = Timer(_PATIENCE, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda nbytes: bar.advance(task, nbytes)
    finally:
        timer.cancel()
        timer.join()
        bar.stop()
