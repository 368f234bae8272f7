"""Ranks in processes of their own, which a test may kill or stop, and how each of them has ended."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from campaigns.common.fork_server import CONTEXT
from tests.helpers.rendezvous import join_store, serve_store


@dataclass(frozen=True)
class Outcome:
    """What the function of a rank returned or raised, when that was known, and the exit status of its process."""

    result: Any
    at: float
    exitcode: int | None


class WatchedRanks:
    """Processes that have announced that they are ready; see :func:`watched_ranks`."""

    def __init__(self, processes: list[BaseProcess], pipes: list[Connection], server: dist.TCPStore | None) -> None:
        self._processes, self._pipes = processes, pipes
        self._server = server  # it must live as long as the ranks

    def await_ready(self) -> None:
        """Wait until each rank has called :func:`report_ready`."""
        for pipe in self._pipes:
            assert pipe.poll(60)
            assert pipe.recv() == "ready"

    def send(self, rank: int, number: int) -> float:
        """Send a signal to a rank. Return the time."""
        os.kill(self._processes[rank].pid or 0, number)
        return time.time()

    def outcome(self, rank: int, timeout: float = 60.0) -> Outcome:
        """Wait until the process of a rank has ended."""
        self._processes[rank].join(timeout)
        result, at = None, 0.0
        while self._pipes[rank].poll():
            try:
                result, at = self._pipes[rank].recv()
            except EOFError:
                break
        return Outcome(result, at, self._processes[rank].exitcode)


@contextmanager
def watched_ranks(
    size: int, function: Callable[..., Any], *args: Any, hosts: str = "", store_in_rank_0: bool = False
) -> Iterator[WatchedRanks]:
    """Run ``function(pipe, rank, *args)`` on ranks. ``hosts`` has a letter for the host of each, by default one."""
    processes, pipes = [], []
    with TemporaryDirectory() as folder:
        port_file = Path(folder) / "port"
        server = None if store_in_rank_0 else serve_store(port_file)
        for rank in range(size):
            ours, theirs = CONTEXT.Pipe()
            host = hosts[rank : rank + 1]
            target = (theirs, rank, size, port_file, host, store_in_rank_0, function, args)
            processes.append(CONTEXT.Process(target=_serve, args=target, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            yield WatchedRanks(processes, pipes, server)
        finally:
            for process in processes:
                process.kill()
                process.join(20)


def report_ready(pipe: Connection) -> None:
    """Tell the test that this rank watches, and that all others do."""
    time.sleep(1.0)  # they learn each other's processes within an interval
    dist.barrier()
    pipe.send("ready")


def _serve(
    pipe: Connection,
    rank: int,
    size: int,
    port_file: Path,
    host: str,
    store_in_rank_0: bool,
    function: Callable[..., Any],
    args: Any,
) -> None:
    torch.set_num_threads(1)
    store = serve_store(port_file) if store_in_rank_0 and rank == 0 else join_store(port_file)
    with ExitStack() as stack:
        if host:
            stack.enter_context(mock.patch("rankless.liveness.watch.pid_namespace", return_value=host))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        try:
            result = function(pipe, rank, *args)
        except BaseException as error:
            pipe.send((error, time.time()))
            raise
        pipe.send((result, time.time()))
