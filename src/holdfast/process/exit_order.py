"""What is done when a process ends, in which order.

``atexit`` is not enough: processes of :mod:`multiprocessing`, and so of ``torch.multiprocessing.spawn``, end without
it. They do run :class:`multiprocessing.util.Finalize`, and so does every other process, by ``atexit``.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from multiprocessing.util import Finalize


class ExitStage(IntEnum):
    """When a function is called at exit: the highest stage first. Those below zero come after all child processes."""

    #: Saves in flight are written and committed.
    SAVES = 30
    #: Threads that talk to the other ranks of their own accord stop.
    WATCHERS = 20
    #: No thread is inside the key-value store when the interpreter ends: it would abort the process.
    STORE = 10
    #: The exit status is decided.
    STATUS = -10


def call_at_exit(stage: ExitStage, function: Callable[[], object]) -> Finalize:
    """Call ``function`` when this process ends; not in processes that are forked from it. ``cancel()`` undoes it."""
    return Finalize(None, function, exitpriority=int(stage))
