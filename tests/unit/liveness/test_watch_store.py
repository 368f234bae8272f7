"""Tests what ranks post in the store, and how many calls that takes."""

from __future__ import annotations

import os
from collections import Counter
from unittest import mock

import pytest
from torch.distributed import HashStore, Store

from rankless.engine.comm.daemon_executor import DaemonExecutor
from rankless.engine.comm.job_store import DeadlineStore
from rankless.liveness.rank_loss import LossEvidence, RankLoss
from rankless.liveness.rank_loss_reaction import Reaction
from rankless.liveness.watch import SeparateConnection
from rankless.liveness.watch_store import LocalProcess, Notice, WatchStore
from rankless.liveness.watcher import Member, Watcher, WatchTimes


class CountingStore(Store):
    """A store that counts the calls of all ranks and the keys in them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls, self.keys = HashStore(), Counter[str](), 0

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self.calls["set"] += 1
        self.inner.set(key, value)  # type: ignore[arg-type]

    def add(self, key: str, amount: int) -> int:
        self.calls["add"] += 1
        return self.inner.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        self.calls["check"] += 1
        return self.inner.check(keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:  # type: ignore[override]
        self.calls["get"] += 1
        self.keys += len(keys)
        return self.inner.multi_get(keys)


def boards(size: int, store: Store | None = None) -> list[WatchStore]:
    keys = DeadlineStore(store or HashStore(), DaemonExecutor("test"), 10.0)
    return [WatchStore(keys, rank, f"host{rank // 8}") for rank in range(size)]


@pytest.mark.parametrize("size", [2, 16, 128])
def test_a_rank_makes_two_calls_in_an_interval_however_many_there_are(size: int) -> None:
    store, times = CountingStore(), WatchTimes(1.0, 30.0)
    reaction = Reaction(mock.Mock(), None)
    watchers = [
        Watcher(board, Member(rank, range(size)), times, reaction, lambda: True)
        for rank, board in enumerate(boards(size, store))
    ]
    with mock.patch("os.getpid", return_value=os.getpid()):
        for _ in range(3):  # they begin, and meet
            assert [watcher._take_turn() for watcher in watchers] == [None] * size
        store.calls.clear()
        store.keys = 0
        assert [watcher._take_turn() for watcher in watchers] == [None] * size
    assert store.calls == {"set": size, "get": size}
    assert store.keys == 3 * size
    for watcher in watchers:
        watcher._processes.close()


def test_ranks_of_a_host_learn_of_each_other_once() -> None:
    first, second, *_, other = boards(9)
    for pid, board in enumerate((first, second, other)):
        board.join(100 + pid)
        board.beat()
    notices, processes, beat = first.look(1)
    assert (notices, processes, beat) == (0, 2, b"1")
    assert list(first.read_processes(processes)) == [LocalProcess(1, 101)]
    assert list(first.read_processes(processes)) == []
    assert first.look(5)[2] is None


def test_a_loss_that_several_find_is_posted_once() -> None:
    first, second = boards(2)
    for board in (first, second):
        board.join(1)
    loss = RankLoss((5,), LossEvidence.ENDED, 0)
    first.post_notice(Notice(loss))
    second.post_notice(Notice(RankLoss((5,), LossEvidence.ENDED, 1)))
    second.post_notice(Notice(RankLoss((6,), LossEvidence.RAISED, 1, "ValueError: no")))
    number = first.look(None)[0]
    assert [notice.loss for notice in first.read_notices(number)] == [
        loss,
        RankLoss((6,), LossEvidence.RAISED, 1, "ValueError: no"),
    ]


def test_a_farewell_is_seen() -> None:
    first, second = boards(2)
    for board in (first, second):
        board.join(1)
        board.beat()
    assert not first.has_left(1)
    second.leave()
    assert first.has_left(1)
    assert not first.has_left(7)


def test_a_separate_connection_has_the_same_keys() -> None:
    store = HashStore()
    connection = SeparateConnection(store)
    connection.set("a", b"1")
    assert connection.add("b", 2) == 2
    assert connection.check(["a", "b"])
    assert list(connection.multi_get(["a"])) == [b"1"]
    assert store.get("a") == b"1"
