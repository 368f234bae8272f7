"""A pool of ranks that many tests use.

Starting Python and torch takes seconds; a running rank joins a process group of any size in milliseconds. Each task
gets a new gloo group over a prefix of one store that the parent serves.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import os
import pickle
import random
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from campaigns.common.fork_server import CONTEXT
from rankless import api
from rankless.components import component_calls as components_api
from rankless.components.pending_saves import PendingSaves
from rankless.live_copy import copy_state as live_api
from rankless.run import claims
from rankless.save.background import background_saves
from tests.helpers.torch_limits import forget_meshes

ROOT = Path(__file__).parents[2]
TIMEOUT = 120.0

#: The number of tasks after which new ranks are started. Process groups that something has kept have threads, each of
#: which wakes up a hundred times a second.
MAX_TASKS = 50


class Ranks:
    """Runs functions on 1 to n ranks."""

    def __init__(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._tasks = itertools.count()
        self._tasks_of_workers = 0

    def replace_old_ranks(self) -> None:
        """Let the next task start new ranks, if these have run many tasks. Called between tests."""
        if self._tasks_of_workers >= MAX_TASKS:
            self.close()

    def __call__(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``function(*args)`` returns on each rank. The first error is raised."""
        results = self.outcomes(world_size, function, *args)
        for rank, result in enumerate(results):
            if isinstance(result, BaseException):
                raise AssertionError(f"rank {rank} of {world_size} raised") from result
        return results

    def outcomes(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The same, but errors are returned in place of results."""
        self._grow(world_size)
        task = f"task{next(self._tasks)}"
        self._tasks_of_workers += 1
        results = []
        try:
            for rank in range(world_size):
                self._workers[rank][1].send((task, rank, world_size, function, args))
            for process, pipe in self._workers[:world_size]:
                if not pipe.poll(TIMEOUT):
                    raise _timeout_of(process, [*results, *self._answers(world_size)])  # noqa: TRY301
                results.append(pipe.recv())
        except BaseException as error:
            if isinstance(error, (OSError, EOFError)):
                error.add_note(f"exit codes of the ranks: {[process.exitcode for process, _ in self._workers]}")
            self.close()  # the next task gets new ranks
            raise
        return results

    def _answers(self, world_size: int) -> list[Any]:
        """What the ranks have sent by now."""
        return [pipe.recv() for _, pipe in self._workers[:world_size] if pipe.poll()]

    def _grow(self, size: int) -> None:
        while len(self._workers) < size:
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=_serve, args=(theirs, self._store.port), name=f"rank {len(self._workers)}", daemon=True
            )
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def close(self) -> None:
        for _, pipe in self._workers:
            pipe.close()
        for process, _ in self._workers:
            process.join(10)
            process.kill()
        self._workers, self._tasks_of_workers = [], 0


def _timeout_of(process: BaseProcess, answers: list[Any]) -> TimeoutError:
    """That a rank does not answer, with the errors of the others: it may wait for a rank that has failed."""
    error = TimeoutError(f"{process.name} did not answer within {TIMEOUT} s")
    for answer in answers:
        if isinstance(answer, BaseException):
            error.add_note("\n".join(["another rank raised:", repr(answer), *getattr(answer, "__notes__", [])]))
    return error


def _serve(pipe: Connection, port: int) -> None:
    gc.freeze()  # or each collection goes through all that torch consists of
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    while True:
        try:
            task, rank, world_size, function, args = pipe.recv()
        except EOFError:
            return
        # A rank that hangs shows where, before the test gives up.
        faulthandler.dump_traceback_later(TIMEOUT - 10)
        dist.init_process_group("gloo", store=dist.PrefixStore(task, store), rank=rank, world_size=world_size)
        # A group that one rank leaves while another still connects to it takes that one down.
        dist.barrier()
        result = _run(function, args)
        # The default instances would keep the group, and each group has threads that wake up all the time.
        api._defaults.clear()
        claims._claimed.clear()
        while background_saves._flights:
            with suppress(Exception):  # that of a save which the task did not wait for
                api.finalize()
        components_api.saves = PendingSaves()
        live_api._latest_ranks.clear()
        gc.collect()
        gc.freeze()  # what is left are modules, which the task has imported
        pipe.send(result)  # before the barrier, which a rank that waits for one that has failed does not reach
        dist.barrier()  # as above: the function may have made a group
        faulthandler.cancel_dump_traceback_later()
        dist.destroy_process_group()
        forget_meshes()


def _run(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    os.chdir(ROOT)  # an earlier task, or the test that started this process, may have changed it
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    torch.set_num_threads(1)  # an earlier task may have changed it, as Accelerate does, and sums then round otherwise
    try:
        return _portable(function(*args))
    except BaseException as error:  # noqa: BLE001 - handed to the test
        error.add_note("".join(traceback.format_exception(error)))
        return _portable(error)


def _portable(result: Any) -> Any:
    try:
        pickle.loads(pickle.dumps(result))  # noqa: S301
    except Exception as error:  # noqa: BLE001
        return RuntimeError(f"cannot be sent to the test: {result!r} ({error})")
    return result
