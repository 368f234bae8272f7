"""The reaction of a rank to the loss of others: it logs that, raises an error in its main thread, and unblocks it.

:class:`~rankless.liveness.watcher.Watcher` begins and finishes it in its thread;
:class:`~rankless.liveness.watch.Watch` mutes it in the main thread. A process may end only when all other ranks can
know of the loss.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from contextlib import suppress

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup, _world

from rankless.engine.comm.known_failures import known_failures
from rankless.errors import RankFailedError
from rankless.liveness.rank_loss import RankLoss
from rankless.process.main_thread_errors import MainThread, describe_position

_log = logging.getLogger("rankless")

#: Seconds that aborting the communicators may take.
_ABORT_SECONDS = 5.0


class Reaction:
    """The reaction of one process to a loss.

    If the main thread executes no Python code for ``exit_after`` seconds after it, the process ends; never if ``None``.
    """

    def __init__(self, main_thread: MainThread, exit_after: float | None) -> None:
        self._main_thread, self._exit_after = main_thread, exit_after
        self._must_raise = True

    def mute(self) -> None:
        """Only log from now on: the watched code has ended.

        :class:`~rankless.liveness.watch.Watch` calls it in the main thread.
        """
        self._must_raise = False
        self._main_thread.cancel()

    def begin(self, loss: RankLoss) -> None:
        """Log the loss and raise it in the main thread.

        The watching thread calls it, once.
        """
        is_news = known_failures.add(loss.ranks, loss.message)
        self._must_raise = self._must_raise and is_news  # else another watch raises it
        _log.error("%s", loss.message)
        if self._must_raise:
            self._main_thread.raise_error(RankFailedError(loss.message))

    def finish(self, closing: threading.Event) -> None:
        """Unblock the main thread, or end the process if that is impossible and nothing is being closed.

        The watching thread calls it, after all other ranks can know of the loss.
        """
        if not self._must_raise:
            return
        _abort_communicators()
        if self._exit_after is None or self._main_thread.has_raised.wait(self._exit_after):
            return
        if self._must_raise and not closing.is_set():
            _end_process(self._exit_after)


def _abort_communicators() -> None:
    """End the collectives of all groups on GPUs. Groups of gloo cannot be aborted, but notice closed connections.

    ``abort()`` of gloo does not end a blocked call (torch 2.13), but the end of its connections does. If one connection
    stays open, only the end of the process ends the call.
    """
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        return
    backends = [backend for group in list(_world.pg_map) if (backend := _nccl_backend(group)) is not None]
    thread = threading.Thread(target=_abort_together, args=(backends,), name="rankless abort", daemon=True)
    thread.start()
    thread.join(_ABORT_SECONDS)


def _nccl_backend(group: ProcessGroup) -> dist.ProcessGroupNCCL | None:
    with suppress(RuntimeError):  # it has no backend for GPUs
        backend = group._get_backend(torch.device("cuda"))  # noqa: SLF001
        return backend if isinstance(backend, dist.ProcessGroupNCCL) else None
    return None


def _abort_together(backends: list[dist.ProcessGroupNCCL]) -> None:
    """Abort communicators as one NCCL group, else they may wait for each other."""
    if not backends:
        return
    backends[0]._group_start()  # noqa: SLF001
    for backend in backends:
        backend.abort()
    backends[0]._group_end()  # noqa: SLF001


def _end_process(seconds: float) -> None:
    _log.critical(
        "the main thread has not left a call of native code for %g s: this process ends with status 1. It is at %s",
        seconds,
        describe_position(),
    )
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed or replaced
            stream.flush()
    os._exit(1)
