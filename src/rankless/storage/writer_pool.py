"""A pool of writers of many files. A bounded number of them is open.

:mod:`rankless.engine.io.write_stripes` and :mod:`rankless.save.generation_content` write many small ranges with one
pool, on each rank. A file that is closed to make room for another one must be synced before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rankless.storage.closing import ClosingMixin
from rankless.storage.direct_io import DirectWriter, FileWriter
from rankless.storage.open_file_limit import max_open_files


class WriterPool(ClosingMixin):
    """Writers of existing files, safe to use from several threads. A file is opened when it is first written.

    If too many files are open, the least recently used ones that no thread writes are made durable and closed. For
    example, ``write(3, 0, data)`` writes to the start of the file with the number 3.
    """

    def __init__(self, files: Sequence[Path], open_writer: Callable[[Path], FileWriter] = DirectWriter) -> None:
        """Create a pool for ``files``, which are named by their numbers."""
        self._files, self._open_writer, self._max_open = files, open_writer, max_open_files()
        #: The open writers, the least recently used first.
        self._writers: dict[int, FileWriter] = {}
        self._users: dict[int, int] = {}
        self._lock = threading.Lock()

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """Write bytes at an offset of a file."""
        with self._lend(file) as writer:
            writer.write(offset, data)

    @contextmanager
    def _lend(self, file: int) -> Iterator[FileWriter]:
        with self._lock:
            writer = self._take(file)
            self._users[file] = self._users.get(file, 0) + 1
        try:
            yield writer
        finally:
            with self._lock:
                self._users[file] -= 1

    def _take(self, file: int) -> FileWriter:
        """Return the writer of a file as the most recently used one."""
        if file in self._writers:
            self._writers[file] = writer = self._writers.pop(file)
            return writer
        idle = (number for number in [*self._writers] if not self._users.get(number))
        while len(self._writers) >= self._max_open and (number := next(idle, None)) is not None:
            with self._writers.pop(number) as unused:
                unused.sync()
        self._writers[file] = writer = self._open_writer(self._files[file])
        return writer

    def sync(self) -> None:
        """Make everything written so far durable."""
        for writer in self._writers.values():
            writer.sync()

    def close(self) -> None:
        """Close all files, without a sync."""
        with ExitStack() as stack:
            for writer in self._writers.values():
                stack.callback(writer.close)
            self._writers = {}
