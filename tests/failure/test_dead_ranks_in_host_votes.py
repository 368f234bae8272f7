"""Tests votes of ranks on several simulated hosts of which some are killed or stopped."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
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


@pytest.fixture
def boards(tmp_path: Path) -> Path:
    """The folder for what ranks of one host post to each other."""
    (tmp_path / "boards").mkdir()
    return tmp_path / "boards"


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
    """Return how it ends for each rank that is alive."""
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


STRIKES = [
    pytest.param("aabbb", (2,), id="first rank of a host"),
    pytest.param("aabbb", (3,), id="another rank of a host"),
    pytest.param("aabbb", (1,), id="the other rank on the host of rank 0"),
    pytest.param("aabbb", (0,), id="rank 0"),
    pytest.param("aabbb", (2, 3, 4), id="a host"),
    pytest.param("aabbb", (0, 1), id="the host of rank 0"),
    pytest.param("ababab", (1, 4), id="ranks of two hosts"),
]


def assert_named(ends: dict[int, tuple[str, float]], victims: Sequence[int]) -> None:
    names = f"rank {victims[0]}" if len(victims) == 1 else f"ranks {', '.join(map(str, victims))}"
    for message, seconds in ends.values():
        assert message.startswith(f"RankTimeoutError: {names} did not come within the timeout while")
        assert seconds < TIMEOUT + 2


@first_of(4, ("hosts", "victims"), STRIKES)
def test_ranks_that_are_killed_are_named_by_all_others(boards: Path, hosts: str, victims: tuple[int, ...]) -> None:
    assert_named(strike_ranks(hosts, boards, die_before, victims), victims)


def test_a_rank_that_is_stopped_is_named_by_all_others(boards: Path) -> None:
    assert_named(strike_ranks("aabbb", boards, stop_before, (2,)), (2,))


@pytest.mark.parametrize("strike", [die_as_poller, die_as_sender])
def test_a_rank_that_dies_while_it_acts_for_its_host_is_named_alone(
    boards: Path, strike: Callable[[Session], None]
) -> None:
    """The vote that it has posted to goes on without it. It is missing in the next one."""
    ends = strike_ranks("aabbb", boards, strike, (3,))
    for message, seconds in ends.values():
        assert message.startswith("RankTimeoutError: rank 3 did not come within the timeout while committing")
        assert seconds < 2 * TIMEOUT + 2
