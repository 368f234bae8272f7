"""Many files, opened when they are first read from, and closed together."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from holdfast.storage.bulk import BulkReader
from holdfast.storage.closing import Closing

#: Files that are kept open at a time, with a descriptor or two each; others are opened for each read. Processes may
#: have 1024 of all kinds.
_MOST = 192


class Readers(Closing):
    """Reads byte ranges of any number of files. Safe to use from several threads; usable as a context manager.

    The files are closed with it, and at the latest when nobody has it any more.
    """

    def __init__(self, opened: Callable[[Path], BulkReader] = BulkReader) -> None:
        """``opened`` says how the files are read."""
        self._opened = opened
        self._open: dict[Path, BulkReader] = {}
        self._stack, self._lock = ExitStack(), threading.Lock()
        weakref.finalize(self, self._stack.close)

    def read(self, path: Path, offset: int, into: memoryview) -> None:
        """Fill ``into`` from ``offset`` bytes on. Raises ``DamagedError`` where the file ends before."""
        reader = self._open.get(path) or self._keep(path)
        if reader is not None:
            reader.read(offset, into)
            return
        with self._opened(path) as reader:
            reader.read(offset, into)

    def _keep(self, path: Path) -> BulkReader | None:
        with self._lock:
            if path not in self._open and len(self._open) < _MOST:
                self._open[path] = self._stack.enter_context(self._opened(path))
            return self._open.get(path)

    def close(self) -> None:
        """Close all of them."""
        self._open = {}
        self._stack.close()
