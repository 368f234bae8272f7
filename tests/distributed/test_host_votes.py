"""Tests votes of jobs with several ranks on several hosts: the store and rank 0 handle one message for each host.

Hosts are simulated: ranks of one machine take different ids for their host's.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore, Store, TCPStore

import holdfast
from campaigns.common.fork_server import CONTEXT
from holdfast.engine.comm import polling
from holdfast.engine.comm.daemon_executor import DaemonExecutor
from holdfast.engine.comm.host_map import HostAgreement, HostMap
from holdfast.engine.comm.host_vote_channel import HostVoteChannel
from holdfast.engine.comm.session import RankGroup, Session
from holdfast.engine.comm.store import DeadlineStore
from holdfast.engine.comm.vote import RankFailure, VoteOutcome, VoteRound
from holdfast.engine.comm.vote_channel import VoteChannel
from holdfast.errors import HoldfastError, RankFailedError, RankTimeoutError, StorageError
from holdfast.storage import host_board
from holdfast.storage.host_board import HostBoard
from tests.helpers.pool import Ranks

#: Runs a function on ranks, given the host of each as a letter: ``on_hosts("aabb", function, *arguments)``.
OnHosts = Callable[..., list[Any]]


@contextmanager
def simulated_host(name: str, folder: str) -> Iterator[None]:
    """Take an id for that of this rank's host, and a folder for what ranks of one host post to each other."""
    with (
        mock.patch.object(host_board, "_SHARED_MEMORY", Path(folder)),
        mock.patch.object(host_board, "host_id", return_value=f"host {name}"),
        mock.patch("holdfast.save.negotiation.host_id", return_value=f"host {name}"),
    ):
        yield


def run_on_host(hosts: str, folder: str, function: Callable[..., Any], *arguments: Any) -> Any:
    with simulated_host(hosts[dist.get_rank()], folder):
        return function(*arguments)


@pytest.fixture(scope="module", autouse=True)
def _boards_of_threads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with mock.patch.object(host_board, "_SHARED_MEMORY", tmp_path_factory.mktemp("boards")):
        yield


@pytest.fixture
def boards(tmp_path: Path) -> Path:
    """The folder for what ranks of one host post to each other."""
    (tmp_path / "boards").mkdir()
    return tmp_path / "boards"


@pytest.fixture
def on_hosts(ranks: Ranks, boards: Path) -> OnHosts:
    return lambda hosts, *call: ranks(len(hosts), run_on_host, hosts, str(boards), *call)


# ---------------------------------------------------------------------------------------------------------------
# Ranks that are threads, over a store in memory


class CountingStore(DeadlineStore):
    """Counts the keys that one rank sets, asks for and reads in the job's store."""

    def __init__(self, store: Store, executor: DaemonExecutor) -> None:
        super().__init__(store, executor, 20.0)
        self.keys_set, self.keys_read, self.bytes_read, self.polls = list[str](), list[str](), 0, 0

    def set(self, key: str, value: bytes = b"") -> None:
        self.keys_set.append(key)
        super().set(key, value)

    def check(self, keys: Sequence[str]) -> bool:
        self.polls += 1
        return super().check(keys)

    def get(self, *keys: str) -> list[bytes]:
        self.keys_read += keys
        values = super().get(*keys)
        self.bytes_read += sum(map(len, values))
        return values


class SimulatedJob:
    """Threads as ranks. Without ``hosts``, each rank has a key of its own in the store."""

    def __init__(self, size: int, hosts: HostMap | None = None) -> None:
        store = HashStore()
        self.size, self._hosts, self._name = size, hosts, os.urandom(8).hex()
        self.stores = [CountingStore(store, DaemonExecutor(f"store of rank {rank}")) for rank in range(size)]

    def board(self, rank: int, vote: int = 1) -> HostBoard:
        assert self._hosts is not None
        return HostBoard(f"{self._name}-{self._hosts.host_of[rank]}-{vote}")

    def channel(self, rank: int, vote: int = 1) -> VoteChannel:
        if self._hosts is None:
            return VoteChannel(self.stores[rank], vote, self.size)
        return HostVoteChannel(self.stores[rank], vote, self._hosts, rank, self.board(rank, vote))

    def vote(self, outcomes: Sequence[VoteOutcome], timeout: float = 20.0, vote: int = 1) -> list[VoteOutcome]:
        """Return each rank's decision: all payloads, joined."""

        def run_rank(rank: int) -> VoteOutcome:
            vote_round = VoteRound(self.channel(rank, vote), "voting", HostAgreement())
            vote_round.post_outcome(rank, outcomes[rank])
            wait = vote_round.await_decision if rank else vote_round.collect_and_decide
            return wait(timeout, b"|".join)

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(run_rank, range(self.size)))


#: Ranks on few hosts, in any order.
host_maps = st.lists(st.sampled_from(b"abc"), min_size=2, max_size=7).map(
    lambda hosts: HostMap.from_ids([bytes([host]) for host in hosts])
)

FAILURES = [
    RankFailure("StorageError", "could not write /x", 28),
    RankFailure("RankTimeoutError", "rank 9 did not come"),
    RankFailure("PeerFailedError", "another rank failed"),
]


@st.composite
def outcomes_on_hosts(draw: st.DrawFn) -> tuple[HostMap, list[VoteOutcome]]:
    hosts = draw(host_maps)
    failures = st.one_of(st.none(), st.none(), st.sampled_from(FAILURES))
    outcome = st.builds(VoteOutcome, st.sampled_from([b"", b"same", b"other", b"x" * 1000]), failures)
    return hosts, draw(st.lists(outcome, min_size=len(hosts.host_of), max_size=len(hosts.host_of)))


@settings(max_examples=40, deadline=None)
@given(outcomes_on_hosts())
def test_every_rank_gets_the_decision_of_a_vote_without_hosts(case: tuple[HostMap, list[VoteOutcome]]) -> None:
    hosts, outcomes = case
    size = len(outcomes)
    expected = SimulatedJob(size).vote(outcomes)
    assert SimulatedJob(size, hosts).vote(outcomes) == expected == [expected[0]] * size
    assert not list(host_board._SHARED_MEMORY.iterdir())


@given(st.lists(st.binary(max_size=3), min_size=1, max_size=20))
def test_the_hosts_of_all_ranks_are_told_in_runs(ids: list[bytes]) -> None:
    hosts = HostMap.from_ids(ids)
    assert HostMap.from_runs(hosts.runs) == hosts
    for number, ranks in enumerate(hosts.ranks_of):
        assert ranks == [rank for rank, host in enumerate(ids) if host == ids[ranks[0]]]
        assert {hosts.host_of[rank] for rank in ranks} == {number}


def evenly(hosts: int, ranks_per_host: int) -> HostMap:
    return HostMap.from_runs([(host, ranks_per_host) for host in range(hosts)])


@pytest.mark.parametrize(("hosts", "ranks_per_host"), [(2, 2), (2, 8), (4, 2), (4, 4)])
def test_the_store_and_rank_0_handle_one_message_for_each_host(hosts: int, ranks_per_host: int) -> None:
    job = SimulatedJob(hosts * ranks_per_host, evenly(hosts, ranks_per_host))
    with mock.patch.object(host_board, "TURN_SECONDS", 60.0):
        job.vote([VoteOutcome(b"p" * 80)] * job.size)
    set_keys = Counter(key for store in job.stores for key in store.keys_set)
    assert set_keys == Counter([*(f"1/host/{host}" for host in range(hosts)), "1/collected", "1/decision"])
    assert job.stores[0].keys_read == [f"1/host/{host}" for host in range(hosts)]
    assert job.stores[0].bytes_read < hosts * (80 + 20 + ranks_per_host), "equal outcomes are sent once"
    followers = [store for store in job.stores[1:] if store.polls or store.keys_read]
    assert len(followers) == hosts
    assert [store.keys_read for store in followers] == [["1/decision"]] * hosts


@pytest.mark.parametrize("can_post", [True, False])
def test_the_last_rank_of_each_host_that_departs_tells_the_store(can_post: bool) -> None:
    """Nothing may be lost: no rank but rank 0 is left to notice it."""
    hosts = evenly(2, 4)
    job = SimulatedJob(8, hosts)
    channels = [job.channel(rank) for rank in range(8)]
    posts = mock.patch.object(HostBoard, "post", return_value=False) if not can_post else nullcontext()
    with posts, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda rank: channels[rank].depart(rank), range(8)))
    set_keys = [key for store in job.stores for key in store.keys_set]
    assert sorted(set_keys) == ["1/host/0", "1/host/1"]
    assert job.stores[0].check(channels[0].outcome_keys)


def test_while_a_rank_stays_its_host_is_missing() -> None:
    job = SimulatedJob(4, evenly(2, 2))
    for rank in (0, 1, 3):
        job.channel(rank).depart(rank)
    assert [key for store in job.stores for key in store.keys_set] == ["1/host/0"]


def test_without_hosts_rank_0_handles_one_message_for_each_rank() -> None:
    """The control: the counts of the test above are not always small."""
    job = SimulatedJob(8)
    job.vote([VoteOutcome(b"p" * 80)] * 8)
    assert sum(len(store.keys_set) for store in job.stores) == 8 + 2
    assert len(job.stores[0].keys_read) == 8


def test_messages_that_are_lost_within_a_host_are_posted_again() -> None:
    job = SimulatedJob(4, evenly(2, 2))
    with ThreadPoolExecutor(4) as pool:
        rounds = [VoteRound(job.channel(rank), "voting", HostAgreement()) for rank in range(4)]
        for rank in (0, 1, 2):
            rounds[rank].post_outcome(rank, VoteOutcome(bytes([rank])))
        waits = [pool.submit(rounds[0].collect_and_decide, 20.0, b"".join)]
        waits += [pool.submit(rounds[rank].await_decision, 20.0, b"".join) for rank in (1, 2)]
        time.sleep(0.1)
        job.board(2).remove()
        rounds[3].post_outcome(3, VoteOutcome(b"\x03"))
        waits.append(pool.submit(rounds[3].await_decision, 20.0, b"".join))
        assert {wait.result() for wait in waits} == {VoteOutcome(b"\x00\x01\x02\x03")}
    assert "1/direct" not in [key for store in job.stores for key in store.keys_set]


@pytest.mark.parametrize("ranks", [(3,), (0, 1), (0, 1, 2, 3)])
def test_ranks_that_cannot_post_within_their_host_post_to_the_store(ranks: tuple[int, ...]) -> None:
    job = SimulatedJob(4, evenly(2, 2))
    post = HostBoard.post

    def post_if_there_is_memory(self: HostBoard, name: str, message: bytes = b"") -> bool:
        return not (name.isdecimal() and int(name) in ranks) and post(self, name, message)

    with mock.patch.object(HostBoard, "post", post_if_there_is_memory):
        decisions = job.vote([VoteOutcome(bytes([rank])) for rank in range(4)])
    assert decisions == [VoteOutcome(b"\x00|\x01|\x02|\x03")] * 4


def test_a_rank_that_knows_no_hosts_votes_with_the_others() -> None:
    """It was interrupted when it should have learned them, and learns them now."""
    job, stranger = SimulatedJob(4, evenly(2, 2)), HostAgreement()
    agreements = [HostAgreement() for _ in range(4)]
    for agreement in agreements:
        agreement.learn(evenly(2, 2).runs)
    agreements[2] = stranger

    def run_rank(rank: int) -> VoteOutcome:
        channel = VoteChannel(job.stores[rank], 1, 4) if rank == 2 else job.channel(rank)
        vote_round = VoteRound(channel, "voting", agreements[rank])
        vote_round.post_outcome(rank, VoteOutcome(bytes([rank]), host=b"b" if rank == 2 else b""))
        return (vote_round.await_decision if rank else vote_round.collect_and_decide)(2.0, b"".join)

    with ThreadPoolExecutor(4) as pool:
        decisions = list(pool.map(run_rank, range(4)))
    assert {decision.payload for decision in decisions} == {b"\x00\x01\x02\x03"}
    assert stranger.hosts == evenly(2, 2)


# ---------------------------------------------------------------------------------------------------------------
# Sessions of real ranks


def vote_ranks(session: Session) -> bytes:
    return session.vote("voting", lambda: None, lambda _: bytes([session.rank]), b"".join)[1]


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


def save_and_load(path: str) -> list[float]:
    loaded = []
    holdfast.save_checkpoint(path, "s1", {"w": torch.full((1000,), 1.0)})
    pending = holdfast.save_checkpoint(path, "s2", {"w": torch.full((1000,), 2.0)}, async_save=True)
    for tag in ("s1", "s2"):
        target = {"w": torch.zeros(1000)}
        holdfast.load_checkpoint(path, tag, model=target)
        loaded.append(target["w"].mean().item())
        pending.wait()
    return loaded


@pytest.mark.parametrize("hosts", ["aabb", "abab"])
def test_saves_and_loads_side_by_side(on_hosts: OnHosts, boards: Path, tmp_path: Path, hosts: str) -> None:
    assert on_hosts(hosts, save_and_load, str(tmp_path / "run")) == [[1.0, 2.0]] * len(hosts)
    assert not list(boards.iterdir())


def open_session(timeout: float = 20.0) -> Session:
    """Return a session whose ranks know each other's hosts."""
    group = RankGroup()
    session = group.open_session(timeout)
    vote_ranks(session)
    assert isinstance(session._open_channel(session.store, "test"), HostVoteChannel)  # type: ignore[arg-type]
    return session


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


def notice_failure(kind: type[HoldfastError]) -> str:
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
    except HoldfastError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("kind", [RankFailedError, RankTimeoutError])
def test_ranks_that_wait_in_their_work_notice_a_failure(on_hosts: OnHosts, kind: type[HoldfastError]) -> None:
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
    except (KeyboardInterrupt, HoldfastError) as error:
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


# ---------------------------------------------------------------------------------------------------------------
# Ranks that are killed or stopped

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
        except HoldfastError as error:
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


@pytest.mark.parametrize(("hosts", "victims"), STRIKES)
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
