"""A job whose ranks are separate processes, which can be killed or told to stop."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

import rankless
from campaigns.common.fork_server import CONTEXT
from campaigns.resume.training import TrainingConfig, train_model

#: The time limit of a job in seconds.
MAX_SECONDS = 300.0


class Job:
    """An attempt at a training on some ranks. This process hosts the key-value store, as torchrun does."""

    def __init__(self, plan: TrainingConfig, attempt: int, size: int) -> None:
        self._plan, self._attempt = plan, attempt
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        arguments = [(plan, attempt, rank, size, self._store.port) for rank in range(size)]
        self._ranks: list[BaseProcess] = [CONTEXT.Process(target=_run_rank, args=each) for each in arguments]
        self._ends = time.monotonic() + MAX_SECONDS
        for rank in self._ranks:
            rank.start()

    def count_steps(self) -> int:
        """Return the number of steps that rank 0 has done in this attempt."""
        log = self._plan.run / f"log.{self._attempt}.0"
        return log.read_bytes().count(b"\n") if log.exists() else 0

    def wait_for_step(self, steps: int) -> bool:
        """Wait until rank 0 has done ``steps`` steps. Return whether the job still runs."""
        while self.count_steps() < steps:
            self._check_time()
            if not any(rank.is_alive() for rank in self._ranks):
                return False
            time.sleep(0.001)
        return True

    def kill(self) -> None:
        """Send SIGKILL to all ranks and their data-loader workers."""
        for rank in range(len(self._ranks)):
            self._signal(rank, signal.SIGKILL)

    def request_stop(self, rank: int) -> None:
        """Send SIGTERM to one rank and its workers, as ``torchrun`` and Slurm do to all processes."""
        self._signal(rank, signal.SIGTERM)

    def join_ranks(self) -> list[int | None]:
        """Wait for all ranks. Return their exit codes."""
        for rank in self._ranks:
            rank.join(max(0.0, self._ends - time.monotonic()))
        self._check_time()
        return [rank.exitcode for rank in self._ranks]

    def _check_time(self) -> None:
        if time.monotonic() > self._ends:
            raise TimeoutError(f"attempt {self._attempt} was not done after {MAX_SECONDS:.0f} seconds")

    def _signal(self, rank: int, number: signal.Signals) -> None:
        pid = self._ranks[rank].pid
        if pid is not None and self._ranks[rank].is_alive():
            try:
                os.killpg(pid, number)
            except ProcessLookupError:  # it has no process group yet, or has just ended
                self._ranks[rank].kill() if number == signal.SIGKILL else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self.join_ranks()


def _run_rank(plan: TrainingConfig, attempt: int, rank: int, size: int, port: int) -> None:
    os.setpgrp()
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    # Never closed: a rank that is told to stop at its end still finishes its saves.
    train_model(plan, attempt, rankless.preemption())
    rankless.finalize()
    dist.destroy_process_group()
