"""Tests votes of ranks on several hosts: the store and rank 0 handle one message for each host.

Ranks are threads here, over a store in memory.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore, Store

from rankless.engine.comm.daemon_executor import DaemonExecutor
from rankless.engine.comm.host_map import HostAgreement, HostMap
from rankless.engine.comm.host_vote_channel import HostVoteChannel
from rankless.engine.comm.job_store import DeadlineStore
from rankless.engine.comm.vote import RankFailure, VoteOutcome, VoteRound
from rankless.engine.comm.vote_channel import VoteChannel
from rankless.storage import host_mailbox
from rankless.storage.host_mailbox import HostMailbox
from tests.helpers.examples import examples


@pytest.fixture(scope="module", autouse=True)
def _boards_of_threads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with mock.patch.object(host_mailbox, "_SHARED_MEMORY", tmp_path_factory.mktemp("boards")):
        yield


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

    def board(self, rank: int, vote: int = 1) -> HostMailbox:
        assert self._hosts is not None
        return HostMailbox(f"{self._name}-{self._hosts.host_of[rank]}-{vote}")

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


@settings(max_examples=examples(40), deadline=None)
@given(outcomes_on_hosts())
def test_every_rank_gets_the_decision_of_a_vote_without_hosts(case: tuple[HostMap, list[VoteOutcome]]) -> None:
    hosts, outcomes = case
    size = len(outcomes)
    expected = SimulatedJob(size).vote(outcomes)
    assert SimulatedJob(size, hosts).vote(outcomes) == expected == [expected[0]] * size
    assert not list(host_mailbox._SHARED_MEMORY.iterdir())


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
    with mock.patch.object(host_mailbox, "TURN_SECONDS", 60.0):
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
    posts = mock.patch.object(HostMailbox, "post", return_value=False) if not can_post else nullcontext()
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
    post = HostMailbox.post

    def post_if_there_is_memory(self: HostMailbox, name: str, message: bytes = b"") -> bool:
        return not (name.isdecimal() and int(name) in ranks) and post(self, name, message)

    with mock.patch.object(HostMailbox, "post", post_if_there_is_memory):
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
