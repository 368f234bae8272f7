"""Workers of data loaders, when a job is told to end.

``torchrun`` and Slurm send the signal to all processes of a job. A ``DataLoader`` whose workers die of it raises an
error in the training process, which then does not get to its last checkpoint.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess

from holdfast.errors import InvalidArgumentError

#: What job schedulers send.
SIGNALS = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})

#: Seconds between looks at whether the training process is there.
_LOOK = 1.0


def shield_worker(worker: int = 0) -> None:
    """Let a worker of a data loader live on when its job is told to end: pass it as ``worker_init_fn``.

    The worker then ends by such a signal from the training process alone, or when that is gone.
    Raises ``InvalidArgumentError`` in a process that is nobody's worker.
    """
    parent = mp.parent_process()
    if parent is None:
        raise InvalidArgumentError(f"shield_worker({worker}) is for workers: pass it to a DataLoader as worker_init_fn")
    # Blocked in all threads, they are taken by one that is told who has sent them: a handler is not.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    threading.Thread(target=_take_signals, args=(parent,), daemon=True).start()


def _take_signals(parent: BaseProcess) -> None:
    while parent.is_alive():
        taken = signal.sigtimedwait(SIGNALS, _LOOK)
        if taken is not None and taken.si_pid == parent.pid:
            break
    os._exit(0)


@contextmanager
def signals_blocked_in_children() -> Iterator[None]:
    """Processes that are started meanwhile have the signals blocked from their first moment, a fork server too."""
    # Its start unblocks signals, so it must not be later.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
