"""Sparse files that several processes write, each its own bytes.

Bytes are written by calls, not into a mapping: a mapping would have to be reserved first, which fills it with zeros,
and each of its pages costs a fault.

:mod:`rankless.load.part_fetch` writes parts of other hosts so in a load from a local tier: each rank of the host the
bytes that it receives.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from types import TracebackType
from typing import Self

from rankless.storage.aligned_memory import Bytes
from rankless.storage.posix import wrap_os_errors, write_fully


class SparseFile:
    """A file that grows as it is written; unwritten bytes are zeros.

    Its size is not set in advance: a tmpfs with large pages would fill whole ones.
    """

    def __init__(self, path: Path) -> None:
        """Create the file, or open it. Raises ``StorageError``."""
        self._path = path
        with wrap_os_errors("create", path):
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            self._close = weakref.finalize(self, os.close, self._fd)

    def write(self, offset: int, data: Bytes) -> None:
        """Write bytes at an offset. Raises ``StorageError``, also if the file system is full."""
        with wrap_os_errors("write", self._path):
            write_fully(self._fd, data.data, offset)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
