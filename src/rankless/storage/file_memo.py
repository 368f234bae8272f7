"""A memo of values computed from files, valid as long as the file is unchanged.

:mod:`rankless.run.checkpoint_info` and :mod:`rankless.run.added_metrics` remember the contents that they have read, in
any process. The signature must be taken before the file is read.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from rankless.errors import StorageError
from rankless.storage.filesystem_kind import is_local

#: A file that changed less than this many nanoseconds ago may change again without getting other times.
_UNSETTLED_NS = 3 * 10**9

#: The same on a file system of this host that stores nanoseconds: its times come from the kernel's clock, which ticks
#: every 10 ms or more often.
_UNSETTLED_HERE_NS = 10**8

T = TypeVar("T")


class FileSignature(NamedTuple):
    """The identity of a file and its version. The times distinguish reused inodes and equal sizes."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


def sign_file(file: str) -> FileSignature | None:
    """Return the signature of a file, with links followed; ``None`` if it is missing or not accessible."""
    try:
        status = os.stat(file)  # noqa: PTH116 - called thousands of times a save; a Path takes as long to create
    except OSError:
        return None
    return FileSignature(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _is_settled(file: str, signature: FileSignature) -> bool:
    """Return whether a further change of a file would change its times."""
    changed = max(signature.mtime_ns, signature.ctime_ns)
    age = time.time_ns() - changed
    if age > _UNSETTLED_NS or age <= _UNSETTLED_HERE_NS:
        return age > _UNSETTLED_NS
    stores_nanoseconds = changed % 10**9 != 0
    with suppress(StorageError):  # it was removed meanwhile
        return stores_nanoseconds and is_local(Path(file))
    return False


class FileMemo(Generic[T]):
    """Values by the path of the file that they were computed from. It needs no locks with forks and threads.

    If it is full, it drops all values: the ones still needed are soon added again.
    """

    def __init__(self, capacity: int) -> None:
        """Create an empty memo of up to ``capacity`` values."""
        self._capacity = capacity
        self._values: dict[str, tuple[FileSignature, T]] = {}

    def recall(self, file: str) -> T | None:
        """Return the value computed from the file as it is now; ``None`` if there is none."""
        entry = self._values.get(file)
        return entry[1] if entry is not None and entry[0] == sign_file(file) else None

    def remember(self, file: str, signature: FileSignature | None, value: T) -> None:
        """Store a value. ``signature`` is the file's signature before it was read."""
        if signature is None or not _is_settled(file, signature):
            return
        if len(self._values) >= self._capacity:
            self._values.clear()
        self._values[file] = signature, value
