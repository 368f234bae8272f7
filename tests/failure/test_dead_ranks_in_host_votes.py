"""Tests votes of ranks on several simulated hosts of which some are killed or stopped."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

from campaigns.common.fork_server import CONTEXT
from rankless.engine.comm.host_vote_channel import HostVoteChannel
from rankless.engine.comm.session import Session
from rankless.errors import RanklessError
from tests.helpers.pairwise import first_of
from tests.helpers.simulated_hosts import open_session, simulated_host

TIMEOUT = 4.0


def live(
    rank: int, hosts: str, folder: str, port: int, pipe: Any, strike: Callable[[Session], None], victims: Sequence[int]
) -> None:
    """Vote once, strike the victims, and vote again, twice. Send how that ends, and after how long."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(hosts), timeout=timedelta(seconds=60))
    with simulated_host(hosts[rank], folder):
        session = open_session(TIMEOUT)
        started = time.monotonic()
        try:
            if rank in victims:
                strike(session)
            session.run_on_all("writing", lambda: None)
            session.run_on_all("committing", lambda: None)
            pipe.send(("no error", 0.0))
        except RanklessError as error:
            pipe.send((f"{type(error).__name__}: {error}", time.monotonic() - started))
    os._exit(0)


def die_before(_: Session) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_before(_: Session) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def die_as_poller(_: Session) -> None:
    """Die after taking the turn to poll the store for this host."""

    def take_turn_and_die(self: HostVoteChannel) -> bool:
        self._board.post("poll", str(self._rank).encode())
        os.kill(os.getpid(), signal.SIGKILL)
        return False

    HostVoteChannel._has_turn = take_turn_and_die  # type: ignore[method-assign]


def die_as_sender(_: Session) -> None:
    """Die as the last rank of the host, instead of sending the outcomes of all."""
    time.sleep(1.0)
    HostVoteChannel._send = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]


def strike_ranks(
    hosts: str, folder: Path, strike: Callable[[Session], None], victims: Sequence[int]
) -> dict[int, tuple[str, float]]:
    """Return how it ends for each rank that is alive. Ranks of one host post to each other in ``folder``."""
    folder.mkdir()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [CONTEXT.Pipe(duplex=False) for _ in hosts]
    processes = [
        CONTEXT.Process(target=live, args=(rank, hosts, str(folder), store.port, pipes[rank][1], strike, victims))
        for rank in range(len(hosts))
    ]
    for process in processes:
        process.start()
    try:
        living = [rank for rank in range(len(hosts)) if rank not in victims]
        assert all(pipes[rank][0].poll(100) for rank in living), "a rank hangs"
        return {rank: pipes[rank][0].recv() for rank in living}
    finally:
        for process in processes:
            process.kill()
            process.join()


def strike_jobs(
    folder: Path, jobs: Sequence[tuple[str, Callable[[Session], None], Sequence[int]]]
) -> list[dict[int, tuple[str, float]]]:
    """Return how it ends for the ranks of each job. All jobs wait at the same time."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        calls = [
            pool.submit(strike_ranks, hosts, folder / str(number), strike, victims)
            for number, (hosts, strike, victims) in enumerate(jobs)
        ]
        return [call.result() for call in calls]


#: The hosts and the victims of two jobs at a time.
VICTIMS = [
    pytest.param([("aabbb", (2,)), ("aabbb", (0,))], id="the first rank of a host, rank 0"),
    pytest.param([("aabbb", (3,)), ("aabbb", (1,))], id="another rank of a host, or of the host of rank 0"),
    pytest.param([("aabbb", (2, 3, 4)), ("aabbb", (0, 1))], id="a host, the host of rank 0"),
    pytest.param([("ababab", (1, 4))], id="ranks of two hosts"),
]


def assert_named(ends: dict[int, tuple[str, float]], victims: Sequence[int]) -> None:
    names = f"rank {victims[0]}" if len(victims) == 1 else f"ranks {', '.join(map(str, victims))}"
    for message, seconds in ends.values():
        assert message.startswith(f"RankTimeoutError: {names} did not come within the timeout while")
        assert seconds < TIMEOUT + 2


@first_of(2, "killed", VICTIMS)
def test_ranks_that_are_killed_are_named_by_all_others(
    tmp_path: Path, killed: list[tuple[str, tuple[int, ...]]]
) -> None:
    jobs = [(hosts, die_before, victims) for hosts, victims in killed]
    for ends, (_, victims) in zip(strike_jobs(tmp_path, jobs), killed, strict=True):
        assert_named(ends, victims)


def test_a_rank_that_is_stopped_is_named_by_all_others(tmp_path: Path) -> None:
    assert_named(strike_ranks("aabbb", tmp_path / "boards", stop_before, (2,)), (2,))


def test_a_rank_that_dies_while_it_acts_for_its_host_is_named_alone(tmp_path: Path) -> None:
    """The vote that it has posted to goes on without it. It is missing in the next one."""
    for ends in strike_jobs(tmp_path, [("aabbb", strike, (3,)) for strike in (die_as_poller, die_as_sender)]):
        for message, seconds in ends.values():
            assert message.startswith("RankTimeoutError: rank 3 did not come within the timeout while committing")
            assert seconds < 2 * TIMEOUT + 2
