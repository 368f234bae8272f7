"""A pool of readers of many files, which are opened at their first read and closed together.

A load, a view or a verification has one for each read, through :class:`~rankless.engine.io.source_reader.SourceReader`,
on each rank.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

from rankless.storage.closing import ClosingMixin
from rankless.storage.direct_io import BufferedReader
from rankless.storage.object_path import ObjectPath
from rankless.storage.open_file_limit import max_open_files
from rankless.storage.store import RangeReader

#: Makes a pool of readers, given a function that opens one file of a file system.
MakeReaders = Callable[[Callable[[Path], BufferedReader]], "ReaderPool"]


class ReaderPool(ClosingMixin):
    """A reader of byte ranges of any number of files, safe to use from several threads.

    As many files are kept open as :func:`max_open_files` allows; further ones are opened for each read.
    :meth:`close`, the end of a ``with`` block or the garbage collector closes the files.
    """

    def __init__(self, open_reader: Callable[[Path], BufferedReader] = BufferedReader) -> None:
        """Create an empty pool. ``open_reader`` opens one file of a file system."""
        self._open_reader, self._max_open = open_reader, max_open_files()
        self._readers: dict[Path, RangeReader] = {}
        self._stack, self._lock = ExitStack(), threading.Lock()
        weakref.finalize(self, self._stack.close)

    def read(self, path: Path, offset: int, into: memoryview) -> None:
        """Fill ``into`` from byte ``offset`` on. Raises ``CorruptCheckpointError`` if the file ends before."""
        with self._lend_reader(path) as reader:
            reader.read(offset, into)

    def read_in_chunks(self, path: Path, offset: int, into: memoryview) -> Iterator[memoryview]:
        """Fill ``into`` as :meth:`read` does, and yield each chunk of it, in order, right after it was filled."""
        with self._lend_reader(path) as reader:
            yield from reader.read_in_chunks(offset, into)

    def _lend_reader(self, path: Path) -> AbstractContextManager[RangeReader]:
        pooled = self._readers.get(path) or self._add_reader(path)
        return self._open(path) if pooled is None else nullcontext(pooled)

    def _open(self, path: Path) -> RangeReader:
        return path.store.open_reader(path) if isinstance(path, ObjectPath) else self._open_reader(path)

    def _add_reader(self, path: Path) -> RangeReader | None:
        with self._lock:
            if path not in self._readers and len(self._readers) < self._max_open:
                self._readers[path] = self._stack.enter_context(self._open(path))
            return self._readers.get(path)

    def close(self) -> None:
        """Close all files."""
        self._readers = {}
        self._stack.close()
