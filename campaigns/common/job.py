"""Jobs whose ranks are separate processes, as torchrun starts them, which can be killed, stopped and woken."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import Store

from campaigns.common.fork_server import CONTEXT
from rankless.errors import RanklessError
from rankless.storage import posix

#: The owner of the ranks' key-value store: rank 0, torchrun (here: this process), or a file.
STORES = ("rank 0", "agent", "file")

# Torch's messages about lost peers are expected here.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
_STARTING = threading.Lock()


@dataclass(frozen=True)
class RankOutcome:
    """The end of a rank's part, with its time by a shared clock. ``error`` is the name of its type."""

    time: float
    result: Any = None
    error: str = ""
    message: str = ""
    is_typed: bool = False


class Rank:
    """A handle on this process as a rank of a job."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def send_message(self, message: str) -> None:
        """Send the campaign a message, with the time."""
        self._pipe.send((message, time.monotonic()))

    def wait_for_all_ranks(self) -> None:
        """Wait for all ranks, without using their process group or their store."""
        self.send_message("here")
        self._pipe.recv()

    def kill_process(self) -> None:
        """Kill this process, as from outside."""
        self.send_message("killed")
        os.kill(os.getpid(), signal.SIGKILL)

    def stop_process(self) -> None:
        """Stop this process until the campaign wakes it."""
        self.send_message("stopped")
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread must not make one more call


#: The function that a rank runs.
RankFunction = Callable[..., Any]


class Job:
    """A number of ranks that each run the same function. At the end of the context, all its processes are killed."""

    def __init__(
        self,
        size: int,
        store: str,
        scratch: Path,
        part: RankFunction,
        *args: Any,
        backend: str = "gloo",
        hosts: str = "",
    ) -> None:
        """Start the ranks. ``hosts`` has a letter for the simulated host of each; by default they share one."""
        self.messages: dict[tuple[int, str], float] = {}
        self.outcomes: dict[int, RankOutcome] = {}
        self.size = size
        self._agent = (
            dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if store == "agent" else None
        )
        address = str(scratch / f"store-{time.monotonic_ns()}") if store == "file" else ""
        address = str(self._agent.port) if self._agent else address
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        for rank in range(size):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=_run_rank,
                args=(theirs, rank, size, store, address, backend, part, args, hosts[rank : rank + 1]),
                daemon=True,
            )
            with _STARTING:
                process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
            if rank == 0 and store == "rank 0":
                address = ours.recv()

    def send_signal(self, rank: int, number: int) -> float:
        """Send a rank a signal. Return the time."""
        pid = self._processes[rank].pid
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return time.monotonic()

    def wait_until(self, until: Callable[[], bool], seconds: float) -> bool:
        """Receive messages of the ranks until a condition holds. Return whether it does."""
        ends = time.monotonic() + seconds
        while not until() and (left := ends - time.monotonic()) > 0:
            for pipe in wait([pipe for pipe in self._pipes if not pipe.closed], min(left, 1.0)):
                self._receive_message(self._pipes.index(pipe))  # type: ignore[arg-type]
        return until()

    def _receive_message(self, rank: int) -> None:
        try:
            message, content = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            self._pipes[rank].close()
            return
        if isinstance(content, RankOutcome):
            self.outcomes[rank] = content
        else:
            self.messages[rank, message] = content
            if message == "here" and all((other, message) in self.messages for other in range(len(self._pipes))):
                for pipe in self._pipes:
                    pipe.send("go")

    def count_messages(self, message: str) -> int:
        """Return how many ranks have sent a message."""
        return sum((rank, message) in self.messages for rank in range(self.size))

    def have_ended(self, *without: int) -> bool:
        """Return whether all these ranks have ended or died."""
        there = [rank for rank, pipe in enumerate(self._pipes) if not pipe.closed and rank not in without]
        return all(rank in self.outcomes for rank in there)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()


def _run_rank(
    pipe: Connection,
    rank: int,
    size: int,
    store: str,
    address: str,
    backend: str,
    part: RankFunction,
    args: tuple[Any, ...],
    host: str,
) -> None:
    torch.set_num_threads(1)
    if host:
        mock.patch.object(posix, "_BOOT_ID", mock.Mock(**{"read_text.return_value": f"host {host}"})).start()
    logging.getLogger("rankless").addHandler(logging.NullHandler())  # the campaign reports failures
    dist.init_process_group(
        backend,
        store=_open_store(pipe, rank, size, store, address),
        rank=rank,
        world_size=size,
        timeout=timedelta(minutes=5),
    )
    try:
        result = part(Rank(pipe), *args)
        end = RankOutcome(time.monotonic(), result)
    except Exception as error:  # noqa: BLE001 - the campaign checks it
        typed = isinstance(error, RanklessError)
        message = str(error) if typed else traceback.format_exc()
        end = RankOutcome(time.monotonic(), None, type(error).__name__, message, typed)
    pipe.send(("end", end))
    # Ranks stay alive until the campaign ends all of them: a rank that exits early is not tested here.
    time.sleep(3600)


def _open_store(pipe: Connection, rank: int, size: int, store: str, address: str) -> Store:
    if store == "file":
        return dist.FileStore(address, size)
    if store == "rank 0" and rank == 0:
        served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pipe.send(str(served.port))
        return served
    return dist.TCPStore("127.0.0.1", int(address), is_master=False)
