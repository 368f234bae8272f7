"""A view of a run that is shown again and again: ``rankless ls --watch`` and ``rankless top``.

Both run in one process, and only read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

from rich.console import RenderableType
from rich.live import Live

from rankless.errors import NoCheckpointError
from rankless.observe.terminal import terminal_console
from rankless.storage.store import store_of

#: Seconds between two looks at the run.
_SECONDS = 2.0


class LiveView(NamedTuple):
    """The content of a view, and the part that must change before it is printed again without a terminal."""

    content: RenderableType
    state: object


def show_live(run: Path, build: Callable[[], LiveView]) -> NoReturn:
    """Show a view of a run until the user presses Ctrl-C. On no terminal, print it when its state has changed.

    Raises ``NoCheckpointError`` when the run's folder is removed.
    """
    out, seen = terminal_console(), None
    with Live(console=out, auto_refresh=False, transient=True) as live:
        while True:
            view = build()
            if not store_of(run).is_directory(run):
                raise NoCheckpointError(f"the folder {run} was removed")
            if out.is_terminal:
                live.update(view.content, refresh=True)
            elif view.state != seen:
                seen = view.state
                out.print(view.content)
            time.sleep(_SECONDS)
