"""Many files, opened when they are first read from, and closed together."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

from holdfast.storage.closing import ClosingMixin
from holdfast.storage.direct_io import BufferedReader

#: Files that are kept open at a time, with a descriptor or two each; others are opened for each read. Processes may
#: have 1024 of all kinds.
_MOST = 192


class ReaderPool(ClosingMixin):
    """Reads byte ranges of any number of files. Safe to use from several threads; usable as a context manager.

    The files are closed with it, and at the latest when nobody has it any more.
    """

    def __init__(self, opened: Callable[[Path], BufferedReader] = BufferedReader) -> None:
        """``opened`` says how the files are read."""
        self._opened = opened
        self._open: dict[Path, BufferedReader] = {}
        self._stack, self._lock = ExitStack(), threading.Lock()
        weakref.finalize(self, self._stack.close)

    def read(self, path: Path, offset: int, into: memoryview) -> None:
        """Fill ``into`` from ``offset`` bytes on. Raises ``CorruptCheckpointError`` where the file ends before."""
        with self._reader(path) as reader:
            reader.read(offset, into)

    def read_in_parts(self, path: Path, offset: int, into: memoryview) -> Iterator[memoryview]:
        """The same; gives each part of ``into``, in order, when it has just been filled."""
        with self._reader(path) as reader:
            yield from reader.read_in_parts(offset, into)

    def _reader(self, path: Path) -> AbstractContextManager[BufferedReader]:
        kept = self._open.get(path) or self._keep(path)
        return self._opened(path) if kept is None else nullcontext(kept)

    def _keep(self, path: Path) -> BufferedReader | None:
        with self._lock:
            if path not in self._open and len(self._open) < _MOST:
                self._open[path] = self._stack.enter_context(self._opened(path))
            return self._open.get(path)

    def close(self) -> None:
        """Close all of them."""
        self._open = {}
        self._stack.close()
