"""Tests sessions of ranks on several simulated hosts: errors, warnings, forks, and several sessions at a time."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import rankless
from rankless.engine.comm import polling, session
from rankless.engine.comm.host_vote_channel import HostVoteChannel
from rankless.engine.comm.session import RankGroup, Session
from rankless.engine.comm.vote_channel import VoteChannel
from rankless.errors import RankFailedError, RanklessError, RankTimeoutError, StorageError
from tests.helpers.pool import Ranks
from tests.helpers.simulated_hosts import open_session, simulated_host, vote_ranks

#: Runs a function on ranks, given the host of each as a letter: ``on_hosts("aabb", function, *arguments)``.
OnHosts = Callable[..., list[Any]]


def run_on_host(hosts: str, folder: str, function: Callable[..., Any], *arguments: Any) -> Any:
    with simulated_host(hosts[dist.get_rank()], folder):
        return function(*arguments)


@pytest.fixture
def boards(tmp_path: Path) -> Path:
    """The folder for what ranks of one host post to each other."""
    (tmp_path / "boards").mkdir()
    return tmp_path / "boards"


@pytest.fixture
def on_hosts(ranks: Ranks, boards: Path) -> OnHosts:
    return lambda hosts, *call: ranks(len(hosts), run_on_host, hosts, str(boards), *call)


def count_channels() -> list[str]:
    """Return the kinds of channels that votes of two sessions take, one vote and two."""
    opened = []
    opening = Session._open_channel

    def open_channel(self: Session, *arguments: Any) -> VoteChannel:
        channel = opening(self, *arguments)
        opened.append(type(channel).__name__)
        return channel

    group = RankGroup()
    everyone = bytes(range(group.size))
    with mock.patch.object(Session, "_open_channel", open_channel):
        for votes in (1, 2):
            session = group.open_session(20.0)
            assert [vote_ranks(session) for _ in range(votes)] == [everyone] * votes
            session.leave()
    return opened


@pytest.mark.parametrize("hosts", ["aaa", "abc", "ab"])
def test_jobs_on_one_host_or_with_one_rank_on_each_vote_without_hosts(on_hosts: OnHosts, hosts: str) -> None:
    assert on_hosts(hosts, count_channels) == [["VoteChannel"] * 5] * len(hosts)


@pytest.mark.parametrize("hosts", ["aab", "abab", "aabbb"])
def test_the_first_vote_finds_out_the_hosts_for_all_that_follow(on_hosts: OnHosts, boards: Path, hosts: str) -> None:
    expected = ["VoteChannel", *["HostVoteChannel"] * 4]
    assert on_hosts(hosts, count_channels) == [expected] * len(hosts)
    assert not list(boards.iterdir())


def count_removals() -> int:
    group = RankGroup()
    vote_ranks(group.open_session(20.0))  # the ranks learn their hosts
    current = group.open_session(20.0)
    with mock.patch.object(session, "remove_stale_boards") as remove:
        for _ in range(3):
            vote_ranks(current)
    return remove.call_count


def test_boards_of_killed_jobs_are_looked_for_once_in_a_session(on_hosts: OnHosts) -> None:
    assert on_hosts("aab", count_removals) == [1, 1, 1]


def save_and_load(path: str) -> list[float]:
    loaded = []
    rankless.save_checkpoint(path, "s1", {"w": torch.full((1000,), 1.0)})
    pending = rankless.save_checkpoint(path, "s2", {"w": torch.full((1000,), 2.0)}, async_save=True)
    for tag in ("s1", "s2"):
        target = {"w": torch.zeros(1000)}
        rankless.load_checkpoint(path, tag, model=target)
        loaded.append(target["w"].mean().item())
        pending.wait()
    return loaded


@pytest.mark.parametrize("hosts", ["aabb", "abab"])
def test_saves_and_loads_side_by_side(on_hosts: OnHosts, boards: Path, tmp_path: Path, hosts: str) -> None:
    assert on_hosts(hosts, save_and_load, str(tmp_path / "run")) == [[1.0, 2.0]] * len(hosts)
    assert not list(boards.iterdir())


def fail_on(failing: Sequence[int]) -> tuple[str, bytes]:
    session = open_session()

    def work() -> None:
        if session.rank in failing:
            raise StorageError(28, f"no space for rank {session.rank}")

    with pytest.raises(StorageError) as caught:
        session.run_on_all("writing", work)
    return str(caught.value), vote_ranks(session)


def test_the_error_of_any_rank_is_raised_by_all_and_a_later_vote_works(on_hosts: OnHosts) -> None:
    error = "[Errno 28] rank 3 of 4, writing: no space for rank 3"
    assert on_hosts("aabb", fail_on, (3,)) == [(error, bytes(range(4)))] * 4
    error = "[Errno 28] rank 1 of 4, writing: no space for rank 1 (rank 2 failed too, differently)"
    assert on_hosts("aabb", fail_on, (1, 2)) == [(error, bytes(range(4)))] * 4


def notice_failure(kind: type[RanklessError]) -> str:
    """Rank 3 fails in work in which the others wait for it."""
    session = open_session()

    def work() -> None:
        if session.rank == 3:
            raise kind("lost")
        for _ in range(1000):
            session.raise_if_peer_failed()
            time.sleep(0.01)

    try:
        session.run_on_all("exchanging", work)
    except RanklessError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("kind", [RankFailedError, RankTimeoutError])
def test_ranks_that_wait_in_their_work_notice_a_failure(on_hosts: OnHosts, kind: type[RanklessError]) -> None:
    first, *others = on_hosts("aabb", notice_failure, kind)
    assert first.startswith(kind.__name__)
    assert "rank 3" in first or kind is RankTimeoutError
    assert others == [first] * 3


def interrupt_while_waiting(who: int) -> str:
    """Interrupt a rank that has posted, and waits; return what the others decide."""
    session = open_session()

    def work() -> None:
        time.sleep(0.0 if session.rank == who else 0.5)

    interrupted = mock.Mock(side_effect=KeyboardInterrupt)
    try:
        with mock.patch.object(polling.time, "sleep", interrupted) if session.rank == who else mock.MagicMock():
            session.vote("voting", work if session.rank != who else lambda: None, lambda _: b"x", b"".join)
    except KeyboardInterrupt:
        return "interrupted"
    return "decided"


@pytest.mark.parametrize("who", [1, 2])
def test_a_rank_that_is_interrupted_while_it_waits_does_not_fail_the_others(on_hosts: OnHosts, who: int) -> None:
    ends = on_hosts("aabb", interrupt_while_waiting, who)
    assert ends == ["interrupted" if rank == who else "decided" for rank in range(4)]


def interrupt_work(who: int) -> str:
    session = open_session()

    def work() -> None:
        if session.rank == who:
            raise KeyboardInterrupt

    try:
        session.run_on_all("writing", work)
    except (KeyboardInterrupt, RanklessError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_rank_that_is_interrupted_in_its_work_fails_the_others(on_hosts: OnHosts) -> None:
    error = "RankFailedError: rank 2 of 4, writing: KeyboardInterrupt: "
    assert on_hosts("aabb", interrupt_work, 2) == [error, error, "KeyboardInterrupt: ", error]


def log_waits(late: Sequence[int]) -> list[str]:
    session, messages = open_session(), list[str]()
    with mock.patch.object(polling, "QUIET_SECONDS", 1.0), mock.patch.object(polling._log, "warning") as warning:
        session.run_on_all("writing", lambda: time.sleep(3.0 if session.rank in late else 0.0))
        messages += [f"{call.args[1]}" for call in warning.call_args_list]
    return messages


def test_ranks_that_are_late_are_named_in_warnings(on_hosts: OnHosts) -> None:
    logs = on_hosts("aabbbb", log_waits, (1, 4))
    for rank, messages in enumerate(logs):
        assert set(messages) == (set() if rank in {1, 4} else {"ranks 1, 4 while writing"})


def overlap_votes() -> list[bytes]:
    """Finish a vote in another thread, while a vote of another session goes on."""
    session = open_session()
    other = RankGroup().open_session(20.0)
    finish = session.begin_vote("staging", lambda: None, lambda _: bytes([session.rank]), b"".join)
    decisions = [vote_ranks(other)]
    thread = threading.Thread(target=lambda: decisions.append(finish()[1]))
    thread.start()
    decisions.append(vote_ranks(other))
    thread.join()
    return decisions


def test_votes_of_two_sessions_overlap(on_hosts: OnHosts) -> None:
    assert on_hosts("abab", overlap_votes) == [[bytes(range(4))] * 3] * 4


def vote_in_groups() -> list[bytes]:
    decisions = []
    for members in ([0, 1, 2, 4], [5, 4, 3, 2]):
        group = dist.new_group(members)
        if dist.get_rank() in members:
            rank_group = RankGroup(group)
            session = rank_group.open_session(20.0)
            decisions += [vote_ranks(session), vote_ranks(session)]
            assert type(session._channel) is HostVoteChannel
    return decisions


def test_process_groups_with_common_ranks_have_votes_of_their_own(on_hosts: OnHosts) -> None:
    votes = on_hosts("aaabbb", vote_in_groups)
    assert [len(decisions) for decisions in votes] == [2, 2, 4, 2, 4, 2]
    assert {decision for decisions in votes for decision in decisions} == {bytes(range(4))}


def vote_in_a_fork() -> tuple[str, bytes]:
    session = open_session()
    answer, question = multiprocessing.Pipe(duplex=False)
    process = os.fork()
    if not process:
        try:
            vote_ranks(session)
        except RankFailedError as error:
            question.send(str(error))
        finally:
            os._exit(0)
    message = answer.recv() if answer.poll(20) else "no answer"
    os.waitpid(process, 0)
    return message, vote_ranks(session)


def test_a_forked_process_does_not_vote_in_the_place_of_its_rank(on_hosts: OnHosts) -> None:
    for message, decision in on_hosts("aabb", vote_in_a_fork):
        assert "this process was forked from a rank" in message
        assert decision == bytes(range(4))
