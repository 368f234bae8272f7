"""Open files of a save, in a process that is forked from the one that saves.

A worker of a data loader may live for days. With the descriptors that it inherits it would hold the lock of a save that
has ended, and the disk space of files that were removed.
"""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from contextlib import suppress


class ClosedInForks(ABC):
    """Holds open files that are this process's alone."""

    def __init__(self) -> None:
        _holders.add(self)

    @abstractmethod
    def close_in_fork(self) -> None:
        """Close the files in a forked process. What the other process does with them goes on."""


_holders: weakref.WeakSet[ClosedInForks] = weakref.WeakSet()


def _close_all() -> None:
    for holder in list(_holders):
        with suppress(OSError):
            holder.close_in_fork()


os.register_at_fork(after_in_child=_close_all)
