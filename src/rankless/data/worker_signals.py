"""Protection of data loader workers from signals that tell a job to end.

``torchrun`` and Slurm send the signal to all processes of a job. If the workers of a ``DataLoader`` die of it, it
raises an error in the training process, which then does not get to its last checkpoint.

The loaders of rankless protect their workers with it; for other loaders, users pass :func:`shield_worker`.
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

from rankless.errors import InvalidArgumentError

#: Signals that job schedulers send.
SIGNALS = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})

#: Seconds between checks that the training process is alive.
_POLL_INTERVAL = 1.0


def shield_worker(worker: int = 0) -> None:
    """Keep a worker of a data loader alive when its job receives a signal to end: pass it as ``worker_init_fn``.

    The worker then ends only if the training process sends it such a signal, or has ended itself.
    Raises ``InvalidArgumentError`` in a process that is not a worker.
    """
    parent = mp.parent_process()
    if parent is None:
        raise InvalidArgumentError(f"shield_worker({worker}) is for workers: pass it to a DataLoader as worker_init_fn")
    # The signals are blocked in all threads. One thread receives them with sigtimedwait, because that reports the
    # sender's process id and a handler does not.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    threading.Thread(target=_wait_for_signals, args=(parent,), daemon=True).start()


def _wait_for_signals(parent: BaseProcess) -> None:
    while parent.is_alive():
        received = signal.sigtimedwait(SIGNALS, _POLL_INTERVAL)
        if received is not None and received.si_pid == parent.pid:
            break
    os._exit(0)


@contextmanager
def signals_blocked_in_children() -> Iterator[None]:
    """Block the signals in processes that are started meanwhile, from their start on. Also for a fork server."""
    # Starting the resource tracker unblocks signals, so it must be started first.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
