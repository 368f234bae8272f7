"""Tests copies between running ranks of which one is killed in the middle."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
import torch.distributed as dist

import rankless
from campaigns.common.fork_server import CONTEXT
from rankless.engine.io.copy_exchange import CopyExchange
from tests.helpers.pairwise import first_of

TIMEOUT = 5.0

#: Many messages: each has at most 4 MiB.
NUMEL = 16 * 2**20


class Survivor(NamedTuple):
    """How a copy ended on a rank that lived on, and whether a source had its own state afterwards."""

    kind: str
    message: str
    seconds: float
    is_unchanged: bool


def copy_until_killed(pipe: Connection, port: int, rank: int, victim: int, messages: int) -> None:
    """Two sources and a newcomer; the victim dies at the start of one of its messages."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    value = 7.0 if rank == 2 else 3.0
    state = {"w": torch.full((NUMEL,), value), "v": torch.full((NUMEL,), value)}
    begin, begun = CopyExchange._begin, []

    def begin_or_die(exchange: CopyExchange, *arguments: object) -> object:
        begun.append(1)
        if rank == victim and len(begun) == messages:
            os.kill(os.getpid(), signal.SIGKILL)
        return begin(exchange, *arguments)

    CopyExchange._begin = begin_or_die
    started = time.monotonic()
    try:
        rankless.copy_state(state, sources=[0, 1], timeout=TIMEOUT)
    except rankless.RanklessError as error:
        is_unchanged = rank == 2 or all(bool((tensor == 3).all()) for tensor in state.values())
        pipe.send(Survivor(type(error).__name__, str(error), time.monotonic() - started, is_unchanged))
    else:
        pipe.send(Survivor("", "", 0.0, is_unchanged=True))
    os._exit(0)


@first_of(1, ("victim", "messages"), [(1, 5), (0, 12), (2, 9)], ids=["source", "rank 0", "newcomer"])
def test_who_is_killed_is_named_by_all_others_in_time(victim: int, messages: int) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = {}, []
    for rank in range(3):
        pipes[rank], theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=copy_until_killed, args=(theirs, store.port, rank, victim, messages))
        process.start()
        theirs.close()
        processes.append(process)
    survivors = [pipe.recv() for rank, pipe in pipes.items() if rank != victim and pipe.poll(60)]
    for process in processes:
        process.join(10)
    assert processes[victim].exitcode == -signal.SIGKILL
    assert len(survivors) == 2
    for survivor in survivors:
        assert survivor.kind in {"RankTimeoutError", "RankFailedError"}
        assert f"rank {victim}" in survivor.message
        assert survivor.seconds < 4 * TIMEOUT
        assert survivor.is_unchanged
    assert len({survivor.kind for survivor in survivors}) == 1
    for survivor in survivors if victim else ():
        assert "may be partly filled: do not use them" in survivor.message
        assert survivor.message == survivors[0].message
