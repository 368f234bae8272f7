"""Workers of data loaders, when a job is told to end.

``torchrun`` and Slurm send the signal to all processes of a job. A ``DataLoader`` whose workers die of it raises an
error in the training process, which then does not get to its last checkpoint.
"""

from __future__ import annotations

import os
import signal
import threading

#: What job schedulers send.
SIGNALS = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})


def shield_worker(worker: int = 0) -> None:
    """Let a worker of a data loader live on when its job is told to end: pass it as ``worker_init_fn``.

    The worker then ends by such a signal from the training process alone, whose end it notices itself, too.
    """
    del worker
    # Blocked in all threads, they are taken by one that is told who has sent them: a handler is not.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    threading.Thread(target=_take_signals, args=(os.getppid(),), daemon=True).start()


def _take_signals(parent: int) -> None:
    while signal.sigwaitinfo(SIGNALS).si_pid != parent:
        pass
    os._exit(0)
