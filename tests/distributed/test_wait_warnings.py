"""Tests that a rank that waits long for others logs for whom, and in which phase."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

import rankless
from rankless.engine.comm import polling
from rankless.engine.comm import vote as ballot
from rankless.engine.comm.daemon_executor import DaemonExecutor
from rankless.engine.comm.host_map import HostAgreement
from rankless.engine.comm.job_store import DeadlineStore
from rankless.engine.comm.polling import poll_until
from rankless.engine.comm.session import RankGroup as Members
from rankless.engine.comm.vote import VoteOutcome, VoteRound
from rankless.engine.comm.vote_channel import VoteChannel
from rankless.engine.io.p2p import P2PExchange
from rankless.errors import RanklessError
from tests.helpers.layouts import LAYOUTS, fill_run
from tests.helpers.pool import Ranks

MODEL = {"w": torch.ones(8)}


def test_ten_seconds_are_waited_in_silence() -> None:
    assert polling.QUIET_SECONDS == 10


def test_who_is_missing_is_told_again_and_again_at_growing_intervals(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(polling, "QUIET_SECONDS", 0.1)
    assert not poll_until(lambda: False, 1.0, lambda: "rank 7 while writing")
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 4  # after 0.1, 0.2, 0.4 and 0.8 s
    assert {record.name for record in caplog.records} == {"rankless"}
    assert caplog.messages[0] == "waiting for rank 7 while writing for 0 s; timeout after 1 s"


def test_nothing_is_told_when_all_came_meanwhile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(polling, "QUIET_SECONDS", 0.0)
    assert not poll_until(lambda: False, 0.1, lambda: "")
    assert not caplog.records


@contextmanager
def logged() -> Iterator[list[str]]:
    """What this rank logs, with less patience than in life."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("rankless")
    log.addHandler(handler)
    with mock.patch.object(polling, "QUIET_SECONDS", 0.3):
        yield messages
    log.removeHandler(handler)


def who_is_missing(message: str) -> str:
    """The ranks that a message names, and the phase."""
    match = re.fullmatch(r"waiting for (.*) for \d+ s; timeout after \d+ s", message)
    assert match is not None, message
    return match[1]


def absent(call: Callable[[], object], who: int) -> list[str]:
    """What ranks log while one of them does not come."""
    with logged() as messages:
        if dist.get_rank() == who:
            time.sleep(2)
        else:
            with suppress(RanklessError):
                call()
    return messages


def save_without(path: str, who: int, met: bool) -> list[str]:
    if met:
        rankless.save_checkpoint(path, "first", MODEL)
    return absent(lambda: rankless.save_checkpoint(path, "s", MODEL, timeout=1.5), who)


def load_without(path: str, who: int, met: bool) -> list[str]:
    if met:
        rankless.save_checkpoint(path, "first", MODEL)
    return absent(lambda: rankless.load_checkpoint(path, model={"w": torch.zeros(8)}, timeout=1.5), who)


@pytest.mark.parametrize(
    ("call", "who", "met", "expected"),
    [
        (save_without, 1, False, "rank 1 while looking at what to save"),
        (save_without, 0, True, "rank 0 while looking at what to save"),
        (save_without, 0, False, "rank 0 while meeting for the first time"),
        (load_without, 2, True, "rank 2 while finding the checkpoint to load"),
    ],
)
def test_all_who_wait_tell_who_does_not_come(
    ranks: Ranks, tmp_path: Path, call: Any, who: int, met: bool, expected: str
) -> None:
    for rank, messages in enumerate(ranks(3, call, str(tmp_path), who, met)):
        if rank == who:
            assert not messages
        else:
            assert expected in map(who_is_missing, messages)


LATE_RANKS = "ranks 1, 3 while looking at what to save"


def save_with_late_ranks(path: str, named: str) -> list[str]:
    """Let ranks 1 and 3 come only after ranks 0 and 2 have logged whom they wait for."""
    from rankless.save.save_negotiation import capture_training

    def come_late(*arguments: Any, **keywords: Any) -> Any:
        if dist.get_rank() % 2:
            _await(lambda: len(list(Path(named).iterdir())) == 2)
        else:
            threading.Thread(target=report).start()
        return capture_training(*arguments, **keywords)

    def report() -> None:
        _await(lambda: LATE_RANKS in map(who_is_missing, list(messages)))
        Path(named, str(dist.get_rank())).touch()

    with logged() as messages, mock.patch("rankless.save.save_negotiation.capture_training", come_late):
        rankless.save_checkpoint(path, "s", MODEL)
    return messages


def _await(condition: Callable[[], bool]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)


def test_several_who_are_late_are_all_named_and_the_save_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    named = tmp_path / "named"
    named.mkdir()
    logs = ranks(4, save_with_late_ranks, str(tmp_path / "run"), str(named))
    assert all(LATE_RANKS in map(who_is_missing, logs[rank]) for rank in (0, 2))
    assert not any(LATE_RANKS in message for rank in (1, 3) for message in logs[rank])
    assert rankless.has_checkpoint(tmp_path / "run")


def exchange_slowly(path: str) -> list[str]:
    """Rank 1 takes its time over what it sends."""
    send = P2PExchange.send

    def slowly(*arguments: Any) -> Any:
        time.sleep(1.0)
        return send(*arguments)

    made = fill_run(LAYOUTS["tp"][0]())
    slow = mock.patch.object(P2PExchange, "send", slowly if dist.get_rank() == 1 else send)
    with logged() as messages, slow:
        rankless.save_checkpoint(path, "s", made.model)
    return messages


def test_who_is_late_in_an_exchange_is_named(ranks: Ranks, tmp_path: Path) -> None:
    first, _ = ranks(2, exchange_slowly, str(tmp_path))
    assert "rank 1 while exchanging shards of tensors" in map(who_is_missing, first)


def stop_without_one() -> list[str]:
    with logged() as messages:
        if dist.get_rank() == 2:
            time.sleep(5)
            return messages
        with rankless.preemption(signal.SIGTERM, timeout=3.0) as stop, suppress(RanklessError):
            if dist.get_rank() == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(10_000):
                stop.requested()
                time.sleep(0.001)
    return messages


def test_who_does_not_answer_a_signal_is_named(ranks: Ranks) -> None:
    first, second, _ = ranks(3, stop_without_one)
    for messages in (first, second):
        assert any("2 while agreeing on the step to stop at" in who_is_missing(message) for message in messages)


def part_late() -> list[str]:
    session = Members().open_session(10.0)
    session.run_on_all("something", lambda: None)
    with logged() as messages:
        time.sleep(1.0 if dist.get_rank() else 0.0)
        session.leave()
    return messages


def test_rank_0_tells_who_has_not_heard_how_it_ended(ranks: Ranks) -> None:
    first, *others = ranks(3, part_late)
    assert who_is_missing(first[0]) == "ranks 1, 2 while reporting the outcome to all ranks"
    assert others == [[], []]


def test_where_ranks_are_many_each_looks_at_few_keys(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(polling, "QUIET_SECONDS", 0.05)
    monkeypatch.setattr(ballot, "_FEW", 3)
    channel = VoteChannel(DeadlineStore(HashStore(), DaemonExecutor("store"), 5.0), 1, 4)
    vote = VoteRound(channel, "writing", HostAgreement())
    vote.post_outcome(1, VoteOutcome())
    for _ in range(2):
        with suppress(RanklessError):
            vote.await_decision(0.1, lambda _: b"")
        vote.post_outcome(0, VoteOutcome())
    assert [*dict.fromkeys(map(who_is_missing, caplog.messages))] == [
        "rank 0 while writing",
        "other ranks while writing",
    ]
