"""Closing of files that a forked process inherits from a process that saves.

A worker of a data loader may live for days. Through inherited descriptors it would hold the lock of a save that has
ended, and the disk space of removed files.

Files, locks and connections are registered by their classes; the hook of ``os.register_at_fork`` closes them in the
child. The child must not unlock anything: its parent still holds the lock.
"""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from contextlib import suppress


class ClosedInForks(ABC):
    """An owner of open files that forked processes must not keep open."""

    def __init__(self) -> None:
        _instances.add(self)

    @abstractmethod
    def close_in_fork(self) -> None:
        """Close the files in a forked process, without an effect on the parent process."""


_instances: weakref.WeakSet[ClosedInForks] = weakref.WeakSet()


def _close_all() -> None:
    for instance in list(_instances):
        with suppress(OSError):
            instance.close_in_fork()


os.register_at_fork(after_in_child=_close_all)
