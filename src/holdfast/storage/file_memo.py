"""What was made of a file, remembered for as long as the file is the same."""

from __future__ import annotations

import os
import time
from typing import Generic, NamedTuple, TypeVar

#: A file that changed less than so many nanoseconds ago may change again and have the same times as now.
_UNSETTLED = 3 * 10**9

T = TypeVar("T")


class FileSignature(NamedTuple):
    """What tells a file, and a state of it, from others. Inodes and sizes are used again; times make them different."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @property
    def is_settled(self) -> bool:
        """Whether another change of the file would give it other times."""
        return time.time_ns() - max(self.mtime_ns, self.ctime_ns) > _UNSETTLED


def sign_file(file: str) -> FileSignature | None:
    """The signature of a file, links followed; ``None`` if there is none, or none that this process may look at."""
    try:
        found = os.stat(file)  # noqa: PTH116 - thousands of times in each save, and a path takes as long to be made
    except OSError:
        return None
    return FileSignature(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class FileMemo(Generic[T]):
    """Values by the path of the file that they were made of. It has no locks: forks and threads may use it as it is.

    Where it is full, it forgets all: what is needed is soon there again.
    """

    def __init__(self, most: int) -> None:
        """``most``: how many values it holds."""
        self._most = most
        self._values: dict[str, tuple[FileSignature, T]] = {}

    def recall(self, file: str) -> T | None:
        """The value that was made of the file as it is now; ``None`` if that is not known."""
        remembered = self._values.get(file)
        return remembered[1] if remembered is not None and remembered[0] == sign_file(file) else None

    def remember(self, file: str, signature: FileSignature | None, value: T) -> None:
        """Note a value. ``signature`` is the file's from before it was read."""
        if signature is None or not signature.is_settled:
            return
        if len(self._values) >= self._most:
            self._values.clear()
        self._values[file] = signature, value
