"""Tests the end of a session: rank 0 waits for the others, but not for a rank that did not come to a vote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from rankless.engine.comm import session as sessions
from rankless.engine.comm.daemon_executor import DaemonExecutor
from rankless.engine.comm.job_store import DeadlineStore
from rankless.engine.comm.session import Session
from rankless.errors import RankTimeoutError


def prompt(store: dist.Store) -> DeadlineStore:
    return DeadlineStore(store, DaemonExecutor("store"), 20.0)


def waits_of(leave: Callable[[], None]) -> list[float]:
    """For how many seconds rank 0 would wait at most."""
    waits = []

    def note(_: Any, seconds: float, __: Any) -> bool:
        waits.append(seconds)
        return False

    with mock.patch.object(sessions, "poll_until", note):
        leave()
    return waits


def test_rank_0_waits_briefly_after_a_rank_did_not_come() -> None:
    """It has waited for that rank for the whole timeout already."""
    session = Session(prompt(dist.HashStore()), 0, 2, 0.2)
    with pytest.raises(RankTimeoutError, match="rank 1 did not come"):
        session.run_on_all("saving", lambda: None)
    session.timeout = 600.0
    assert waits_of(session.leave) == [sessions._LAST_SECONDS]


def test_rank_0_waits_for_all_others_else() -> None:
    store = dist.HashStore()
    first, second = (Session(prompt(store), rank, 2, 60.0) for rank in range(2))
    second_ends, first_ends = (one.begin_on_all("saving", lambda: None) for one in (second, first))
    first_ends()
    second_ends()
    assert waits_of(first.leave) == [60.0]
