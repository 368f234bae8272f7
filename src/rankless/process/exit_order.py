"""The order of functions that are called when a process ends.

``atexit`` is not enough: processes of :mod:`multiprocessing`, and so of ``torch.multiprocessing.spawn``, end without
it. They run :class:`multiprocessing.util.Finalize`, as does every other process, through ``atexit``.

:mod:`rankless.save.background`, statistics, watches and the threads of the store register here. The order of the stages
must stay: a save that is still in progress votes until its end.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from multiprocessing.util import Finalize


class ExitStage(IntEnum):
    """The stage at exit at which a function is called, the highest first. Stages below 0 follow all child processes."""

    #: Saves in flight are written and committed.
    SAVES = 30
    #: Statistics of saved checkpoints are computed, or abandoned.
    STATISTICS = 25
    #: Background threads that communicate with other ranks stop.
    WATCHERS = 20
    #: Threads leave the key-value store: one inside it when the interpreter ends would abort the process.
    STORE = 10
    #: The exit status is decided.
    STATUS = -10


def call_at_exit(stage: ExitStage, function: Callable[[], object]) -> Finalize:
    """Register ``function`` to be called when this process ends, but not in its forks. ``cancel()`` unregisters it."""
    return Finalize(None, function, exitpriority=int(stage))
