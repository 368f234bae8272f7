"""Tests that ranks which die between saves are named on all others within seconds, and that live ones are not."""

import logging
import os
import re
import signal
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rankless
from rankless.errors import InvalidArgumentError, RankFailedError
from tests.helpers.pairwise import first_of
from tests.helpers.pool import Ranks
from tests.helpers.watched_ranks import WatchedRanks, report_ready, watched_ranks

FAST = {"interval": 0.2, "timeout": 3.0, "exit_after": 1.0}


def step_forever() -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        model(torch.ones(8)).sum().backward()
        optimizer.step()


def all_reduce_forever() -> None:
    while True:
        dist.all_reduce(torch.ones(1000))


def loop_forever() -> None:
    while True:
        pass


def join_forever() -> None:
    thread = threading.Thread(target=time.sleep, args=(600,), daemon=True)
    thread.start()
    thread.join()


WORK: dict[str, Any] = {
    "all_reduce": all_reduce_forever,
    "barrier": dist.barrier,
    "recv": lambda: dist.recv(torch.ones(1), 2),
    "sleep": lambda: time.sleep(600),
    "loop": loop_forever,
    "optimizer step": step_forever,
    "join": join_forever,
}


def work_watched(pipe: Connection, rank: int, victim: int, work: str, options: dict[str, float]) -> None:
    with rankless.watch(**options):
        report_ready(pipe)
        if rank == victim:
            time.sleep(600)
        WORK[work]()


@pytest.mark.parametrize("work", WORK)
def test_a_killed_rank_is_named_at_once_whatever_the_others_do(work: str) -> None:
    with watched_ranks(3, work_watched, 2, work, {}) as ranks:
        ranks.await_ready()
        killed = ranks.send(2, signal.SIGKILL)
        for rank in (0, 1):
            outcome = ranks.outcome(rank)
            assert isinstance(outcome.result, RankFailedError)
            assert str(outcome.result).startswith("rank 2 died: process ")
            assert outcome.at - killed < 3
            assert outcome.exitcode == 1


@pytest.mark.parametrize("hosts", ["", "abc"])
def test_rank_0_is_named_that_takes_the_store_with_it(hosts: str) -> None:
    with watched_ranks(3, work_watched, 0, "sleep", FAST, hosts=hosts, store_in_rank_0=True) as ranks:
        ranks.await_ready()
        killed = ranks.send(0, signal.SIGKILL)
        messages = []
        for rank in (1, 2):
            outcome = ranks.outcome(rank)
            assert isinstance(outcome.result, RankFailedError)
            messages.append(str(outcome.result))
            assert outcome.at - killed < 3
    expected = "rank 0 cannot be reached" if hosts else "rank 0 died"
    assert any(message.startswith(expected) for message in messages)
    # Without the store, a rank that ends because of rank 0 cannot say so: a slower rank of its host names both.
    assert all(re.match(rf"{expected}|ranks 0, [12] died", message) for message in messages)


def test_another_rank_of_the_host_reports_a_death_to_other_hosts() -> None:
    with watched_ranks(4, work_watched, 3, "sleep", {"timeout": 600.0}, hosts="aabb") as ranks:
        ranks.await_ready()
        killed = ranks.send(3, signal.SIGKILL)
        outcome = ranks.outcome(0)
        assert str(outcome.result).startswith("rank 3 died: process ")
        assert "noticed by rank 2" in str(outcome.result)
        assert outcome.at - killed < 4


def test_all_ranks_of_a_lost_host_are_named() -> None:
    with watched_ranks(4, work_watched, 1, "sleep", FAST, hosts="abba") as ranks:
        ranks.await_ready()
        ranks.send(1, signal.SIGKILL)
        killed = ranks.send(2, signal.SIGKILL)
        for rank in (0, 3):
            outcome = ranks.outcome(rank)
            assert str(outcome.result).startswith("ranks 1, 2 sent no heartbeat for 3 s")
            assert "its host is down" in str(outcome.result)
            assert 2 < outcome.at - killed < 8


def stop_both(ranks: WatchedRanks, victims: list[int], seconds: float) -> None:
    ranks.await_ready()
    for victim in victims:
        ranks.send(victim, signal.SIGSTOP)
    time.sleep(seconds)
    for victim in victims:
        ranks.send(victim, signal.SIGCONT)


def sleep_watched(pipe: Connection, rank: int, seconds: float, options: dict[str, float]) -> str:
    with rankless.watch(**options):
        report_ready(pipe)
        ends = time.time() + seconds
        done = torch.zeros(1)
        while not done.item():  # all ranks leave in the same turn: their clocks alone would leave some in a collective
            dist.all_reduce(torch.ones(1))
            time.sleep(0.01)
            done = torch.tensor([float(time.time() >= ends)])
            dist.all_reduce(done, dist.ReduceOp.MAX)
    store = dist.distributed_c10d._get_default_store()
    store.add("done", 1)
    while (
        store.add("done", 0) < dist.get_world_size()
    ):  # a rank that ends closes the connections of others' collectives
        time.sleep(0.05)
    return "done"


@pytest.mark.parametrize(
    ("victims", "seconds", "timeout"),
    [pytest.param([1], 4.0, 8.0, marks=pytest.mark.full), ([0], 4.0, 8.0), ([0, 1, 2], 6.0, 4.0)],
)
def test_a_stopped_rank_is_not_dead_before_the_timeout_nor_are_all_at_once(
    victims: list[int], seconds: float, timeout: float
) -> None:
    with watched_ranks(3, sleep_watched, seconds + 2.0, {**FAST, "timeout": timeout}) as ranks:
        stop_both(ranks, victims, seconds)
        assert [ranks.outcome(rank).result for rank in range(3)] == ["done"] * 3


def test_a_process_that_gloo_blocks_for_a_stopped_rank_ends() -> None:
    with watched_ranks(2, work_watched, 1, "barrier", FAST) as ranks:
        ranks.await_ready()
        stopped = ranks.send(1, signal.SIGSTOP)
        outcome = ranks.outcome(0)
        assert (outcome.result, outcome.exitcode) == (None, 1)
        assert 3 < time.time() - stopped < 9


class WithoutMessageError(Exception):
    def __str__(self) -> str:
        raise KeyError("message")


def end_early(pipe: Connection, rank: int, ending: str) -> str:
    watch = rankless.watch(**FAST)
    report_ready(pipe)
    if rank == 1:
        if ending == "close":
            watch.close()
        if ending == "raise":
            raise ValueError("mine")
        if ending == "surrogate":
            raise ValueError("mine: \ud800" + 5000 * "x")
        if ending == "no message":
            raise WithoutMessageError
        if ending == "destroy":
            dist.destroy_process_group()
            time.sleep(5.0)
        return "early"
    time.sleep(5.0)
    return "late"


@first_of(1, "ending", ["close", "end", "destroy"])
def test_a_rank_that_ends_normally_is_no_failure(ending: str) -> None:
    with watched_ranks(3, end_early, ending) as ranks:
        ranks.await_ready()
        assert [ranks.outcome(rank).result for rank in range(3)] == ["late", "early", "late"]


@pytest.mark.parametrize(
    ("ending", "error"),
    [
        ("raise", "ValueError: mine ("),
        ("surrogate", r"ValueError: mine: \ud800xxxx"),
        ("no message", "WithoutMessageError: (no message: its __str__ raised KeyError)"),
    ],
)
def test_the_error_that_ends_a_rank_is_named(ending: str, error: str) -> None:
    with watched_ranks(3, end_early, ending) as ranks:
        ranks.await_ready()
        for rank in (0, 2):
            message = str(ranks.outcome(rank).result)
            assert message.startswith(f"rank 1 ended with an error: {error}")
            assert len(message) < 2000


def rank_0_ends_first(pipe: Connection, rank: int) -> str:
    rankless.watch(**FAST)
    report_ready(pipe)
    time.sleep(0.0 if rank == 0 else 4.0)
    return "done"


def test_rank_0_may_end_first_although_its_process_has_the_store() -> None:
    with watched_ranks(3, rank_0_ends_first, store_in_rank_0=True) as ranks:
        ranks.await_ready()
        assert [ranks.outcome(rank).result for rank in range(3)] == ["done"] * 3


def go_on_after_an_error(pipe: Connection, rank: int) -> str:
    with suppress(KeyError), rankless.watch(**FAST):
        report_ready(pipe)
        if rank == 1:
            raise KeyError("mine")
    time.sleep(4.0)
    return "done"


def test_an_error_that_is_caught_outside_is_no_failure() -> None:
    with watched_ranks(2, go_on_after_an_error) as ranks:
        ranks.await_ready()
        assert [ranks.outcome(rank).result for rank in range(2)] == ["done"] * 2


def fork_and_wait(pipe: Connection, rank: int) -> str:
    with rankless.watch(**FAST) as watch:
        if (child := os.fork()) == 0:
            watch.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        report_ready(pipe)
        if rank == 1:
            time.sleep(600)
        time.sleep(4.0)  # the farewell of the child would hide that its parent is killed
        return "done"


def test_a_forked_process_does_not_leave_in_place_of_its_rank() -> None:
    with watched_ranks(2, fork_and_wait) as ranks:
        ranks.await_ready()
        ranks.send(1, signal.SIGKILL)
        assert str(ranks.outcome(0).result).startswith("rank 1 died")


def save_watched(pipe: Connection, rank: int, path: str, interrupted: bool) -> Any:
    with rankless.watch(**FAST) as watch:
        rankless.save_checkpoint(path, "first", {"w": torch.ones(4)})
        report_ready(pipe)
        if rank == 1:
            time.sleep(600)
        if interrupted:
            rankless.save_checkpoint(path, "second", {"w": torch.ones(4)})
        watch._reaction.mute()  # the thread of a save gets no signal
        try:
            rankless.save_checkpoint(path, "second", {"w": torch.ones(4)})
        except RankFailedError as error:
            return str(error)
    return "saved"


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_save_in_flight_ends_with_the_name_of_the_dead_rank(tmp_path: Path, interrupted: bool) -> None:
    with watched_ranks(3, save_watched, str(tmp_path), interrupted) as ranks:
        ranks.await_ready()
        time.sleep(0.5)
        killed = ranks.send(1, signal.SIGKILL)
        for rank in (0, 2):
            outcome = ranks.outcome(rank)
            assert "rank 1 died" in str(outcome.result)
            assert outcome.at - killed < 9
    assert [found.tag for found in rankless.list_checkpoints(tmp_path)] == ["first"]


def save_when_the_watch_has_ended(pipe: Connection, rank: int, path: str) -> Any:
    with suppress(RankFailedError), rankless.watch(**FAST):
        rankless.save_checkpoint(path, "first", {"w": torch.ones(4)})
        report_ready(pipe)
        time.sleep(600)
    try:
        rankless.save_checkpoint(path, "second", {"w": torch.ones(4)})
    except RankFailedError as error:
        return str(error)
    return "saved"


def test_a_save_fails_with_the_name_of_the_dead_rank_also_after_the_watch(tmp_path: Path) -> None:
    with watched_ranks(3, save_when_the_watch_has_ended, str(tmp_path)) as ranks:
        ranks.await_ready()
        killed = ranks.send(1, signal.SIGKILL)
        for rank in (0, 2):
            outcome = ranks.outcome(rank)
            assert "rank 1 died" in str(outcome.result)
            assert outcome.at - killed < 20


def two_groups(pipe: Connection, rank: int) -> Any:
    pair = dist.new_group([1, 2])
    others = [dist.new_group([0, 3])]
    with rankless.watch(**FAST):
        with pytest.raises(InvalidArgumentError, match="watched already"):
            rankless.watch()
        if rank in {1, 2}:
            with rankless.watch(pair, **FAST):
                report_ready(pipe)
                time.sleep(600)
        report_ready(pipe)
        time.sleep(600)
    return others


def test_ranks_may_watch_several_groups_and_raise_one_error() -> None:
    with watched_ranks(4, two_groups) as ranks:
        ranks.await_ready()
        ranks.send(2, signal.SIGKILL)
        for rank in (0, 1, 3):
            assert str(ranks.outcome(rank).result).startswith("rank 2 died")


def watch_again(pipe: Connection, rank: int) -> str:
    """Make the group again over the same store, three times. The heartbeats of before stay in it."""
    store = dist.distributed_c10d._get_default_store()
    for generation in range(3):
        with rankless.watch(**FAST):
            dist.barrier()
            time.sleep(1.0)
        dist.barrier()
        dist.destroy_process_group()
        backend = dist.PrefixStore(f"generation {generation}", store)  # gloo would connect to addresses of before
        dist.init_process_group("gloo", store=backend, rank=rank, world_size=2)
    with rankless.watch(**FAST):
        report_ready(pipe)
        time.sleep(600)
    return "done"


def test_a_group_that_is_made_again_is_watched_again() -> None:
    with watched_ranks(2, watch_again) as ranks:
        ranks.await_ready()
        killed = ranks.send(1, signal.SIGKILL)
        outcome = ranks.outcome(0)
        assert str(outcome.result).startswith("rank 1 died")
        assert outcome.at - killed < 3


def close_and_go_on() -> list[bool]:
    """Heartbeats of a watch that is closed stay in the store, under one name for all watches of a group."""
    for _ in range(3):
        with rankless.watch(interval=0.1, timeout=0.6):
            time.sleep(0.3)
    time.sleep(1.0)
    return [True]


def test_a_watch_may_be_closed_and_begun_again(ranks: Ranks) -> None:
    assert ranks(3, close_and_go_on) == [[True]] * 3


# ---------------------------------------------------------------------------------------------------------------
# One process


def test_a_single_process_has_nothing_to_watch() -> None:
    with rankless.watch() as watch:
        assert isinstance(watch, rankless.Watch)
    watch.close()


def test_the_handler_of_the_signal_is_restored_and_others_are_called() -> None:
    seen: list[int] = []
    previous = signal.signal(signal.SIGURG, lambda number, _: seen.append(number))
    try:
        mine = signal.getsignal(signal.SIGURG)
        with rankless.watch():
            os.kill(os.getpid(), signal.SIGURG)
            assert seen == [signal.SIGURG]
        assert signal.getsignal(signal.SIGURG) is mine
    finally:
        signal.signal(signal.SIGURG, previous)


def test_only_the_main_thread_watches() -> None:
    errors: list[BaseException] = []

    def watch_in_thread() -> None:
        try:
            rankless.watch()
        except InvalidArgumentError as error:
            errors.append(error)

    thread = threading.Thread(target=watch_in_thread)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])


@pytest.mark.parametrize(
    "options",
    [{"interval": 0.0}, {"interval": 10.0}, {"timeout": 1.0}, {"timeout": float("nan")}, {"exit_after": -1.0}],
)
def test_numbers_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(InvalidArgumentError):
        rankless.watch(**options)


def test_a_loss_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    from rankless.engine.comm.known_failures import known_failures
    from rankless.liveness.rank_loss import LossEvidence, RankLoss
    from rankless.liveness.rank_loss_reaction import Reaction
    from rankless.process.main_thread_errors import MainThread

    main = MainThread()
    try:
        with caplog.at_level(logging.ERROR, "rankless"), pytest.raises(RankFailedError, match="rank 7 died: process 5"):
            Reaction(main, 1.0).begin(RankLoss((7,), LossEvidence.ENDED, 0, "process 5"))
    finally:
        main.close()
        known_failures.clear()
    assert "rank 7 died" in caplog.text
