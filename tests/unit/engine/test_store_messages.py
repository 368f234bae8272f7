"""Tests messages between ranks through a key-value store, with torch's store of one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.distributed import HashStore

from rankless.engine.comm.daemon_executor import DaemonExecutor
from rankless.engine.comm.job_store import DeadlineStore
from rankless.engine.comm.session import Session
from rankless.engine.comm.store_messages import StoreMessages
from rankless.errors import RankTimeoutError


@pytest.fixture
def store() -> Iterator[DeadlineStore]:
    executor = DaemonExecutor("test")
    yield DeadlineStore(HashStore(), executor, 10.0)
    executor.close()


def make_messages(store: DeadlineStore, rank: int, timeout: float = 10.0) -> StoreMessages:
    return StoreMessages(Session(store, rank, 1000, timeout))


def test_each_receiver_gets_the_messages_of_its_senders(store: DeadlineStore) -> None:
    """More than are received with one call."""
    senders = range(1, 700)
    for sender in senders:
        make_messages(store, sender).send(b"to 0 from %d" % sender, 0)
        make_messages(store, sender).send(b"to 999", 999)
    received = dict(make_messages(store, 0).receive(senders))
    assert received == {sender: b"to 0 from %d" % sender for sender in senders}
    assert dict(make_messages(store, 999).receive([5])) == {5: b"to 999"}


def test_the_rank_that_has_not_sent_is_named(store: DeadlineStore) -> None:
    make_messages(store, 1).send(b"here", 0)
    with pytest.raises(RankTimeoutError, match=r"for rank 2 while exchanging bytes of files"):
        list(make_messages(store, 0, timeout=0.2).receive([1, 2]))
