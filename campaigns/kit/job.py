"""Jobs whose ranks are processes of their own, as torchrun starts them: to be killed, stopped and woken."""

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

import torch
import torch.distributed as dist
from torch.distributed import Store

from campaigns.kit.forks import CONTEXT
from holdfast.errors import HoldfastError

#: In whose hands the ranks' key-value store is: rank 0's, torchrun's (here: this process's), or a file's.
STORES = ("rank 0", "agent", "file")

# What torch has to say of peers that are gone is no news here.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
_STARTING = threading.Lock()


@dataclass(frozen=True)
class End:
    """How a rank's part ended, and when by the clock that all processes share. ``error`` is the name of its type."""

    when: float
    result: Any = None
    error: str = ""
    message: str = ""
    typed: bool = False


class Rank:
    """The process that this is, as one rank of a job, as its function sees it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def tell(self, what: str) -> None:
        """Tell the campaign of something, with the time."""
        self._pipe.send((what, time.monotonic()))

    def meet(self) -> None:
        """Wait until all ranks have come to this, without a word over their process group or their store."""
        self.tell("here")
        self._pipe.recv()

    def die(self) -> None:
        """Be killed, as by another."""
        self.tell("killed")
        os.kill(os.getpid(), signal.SIGKILL)

    def stop(self) -> None:
        """Be stopped, until the campaign wakes this rank."""
        self.tell("stopped")
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread must not go on by a single call


#: What a rank does.
Part = Callable[..., Any]


class Job:
    """Some ranks, each doing the same part. Killed with all its processes when it is left."""

    def __init__(self, size: int, store: str, scratch: Path, part: Part, *args: Any, backend: str = "gloo") -> None:
        self.told: dict[tuple[int, str], float] = {}
        self.ends: dict[int, End] = {}
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
                target=_be, args=(theirs, rank, size, store, address, backend, part, args), daemon=True
            )
            with _STARTING:
                process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
            if rank == 0 and store == "rank 0":
                address = ours.recv()

    def signal(self, rank: int, number: int) -> float:
        """Send a rank a signal; returns when."""
        pid = self._processes[rank].pid
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return time.monotonic()

    def wait(self, until: Callable[[], bool], seconds: float) -> bool:
        """Listen to the ranks until something is so; whether it is."""
        ends = time.monotonic() + seconds
        while not until() and (left := ends - time.monotonic()) > 0:
            for pipe in wait([pipe for pipe in self._pipes if not pipe.closed], min(left, 1.0)):
                self._hear(self._pipes.index(pipe))  # type: ignore[arg-type]
        return until()

    def _hear(self, rank: int) -> None:
        try:
            what, told = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            self._pipes[rank].close()
            return
        if isinstance(told, End):
            self.ends[rank] = told
        else:
            self.told[rank, what] = told
            if what == "here" and all((other, what) in self.told for other in range(len(self._pipes))):
                for pipe in self._pipes:
                    pipe.send("go")

    def is_over(self, *without: int) -> bool:
        """Whether all ranks have ended, or are gone."""
        there = [rank for rank, pipe in enumerate(self._pipes) if not pipe.closed and rank not in without]
        return all(rank in self.ends for rank in there)

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


def _be(
    pipe: Connection, rank: int, size: int, store: str, address: str, backend: str, part: Part, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    logging.getLogger("holdfast").addHandler(logging.NullHandler())  # what fails here is told by the campaign
    dist.init_process_group(
        backend,
        store=_store(pipe, rank, size, store, address),
        rank=rank,
        world_size=size,
        timeout=timedelta(minutes=5),
    )
    try:
        result = part(Rank(pipe), *args)
        end = End(time.monotonic(), result)
    except Exception as error:  # noqa: BLE001 - the campaign judges it
        typed = isinstance(error, HoldfastError)
        message = str(error) if typed else traceback.format_exc()
        end = End(time.monotonic(), None, type(error).__name__, message, typed)
    pipe.send(("end", end))
    # A rank that is there when others look for it at the end is not what is tried here; the campaign ends all.
    time.sleep(3600)


def _store(pipe: Connection, rank: int, size: int, store: str, address: str) -> Store:
    if store == "file":
        return dist.FileStore(address, size)
    if store == "rank 0" and rank == 0:
        served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pipe.send(str(served.port))
        return served
    return dist.TCPStore("127.0.0.1", int(address), is_master=False)
