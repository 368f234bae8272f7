"""Tests that a signal on any rank stops all ranks at the same step."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore, Store, TCPStore

import rankless
from campaigns.common.fork_server import CONTEXT
from rankless.engine.comm.daemon_executor import DaemonExecutor
from rankless.engine.comm.job_store import DeadlineStore
from rankless.engine.comm.session import Session
from rankless.engine.comm.stop_step import StepConsensus
from rankless.errors import InvalidArgumentError, RankFailedError, RankTimeoutError
from rankless.liveness.preemption import Preemption
from tests.helpers.examples import examples
from tests.helpers.pool import Ranks

# ---------------------------------------------------------------------------------------------------------------
# One process


def test_a_signal_is_noticed_at_the_next_call_and_for_good() -> None:
    with rankless.preemption(signal.SIGUSR1) as stop:
        assert not stop.requested()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert [stop.requested() for _ in range(3)] == [True] * 3


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM])
def test_any_of_several_signals_will_do_and_comes_as_often_as_it_likes(number: int) -> None:
    with rankless.preemption(signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2) as stop:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert stop.requested()


def test_sigterm_is_what_it_listens_to_where_nothing_is_said() -> None:
    with rankless.preemption() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested()


def test_signals_are_given_back() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    try:
        stop = rankless.preemption(signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not seen
        stop.close()
        stop.close()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert seen == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_second_interrupt_interrupts() -> None:
    with rankless.preemption(signal.SIGINT) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_that_comes_while_handlers_are_installed_counts() -> None:
    plain = signal.signal

    def then_told(number: int, handler: Any) -> Any:
        before = plain(number, handler)
        if handler is not before and callable(handler):
            os.kill(os.getpid(), number)
        return before

    with mock.patch.object(signal, "signal", then_told):
        stop = rankless.preemption(signal.SIGUSR1)
    with stop:
        assert stop.requested()


def test_a_process_that_was_forked_ends_as_it_would_without() -> None:
    with rankless.preemption(signal.SIGTERM) as stop:
        ready, say = os.pipe()
        child = os.fork()
        if not child:
            os.write(say, b".")  # before this, Python forgets signals: they may be the parent's
            time.sleep(60)
            os._exit(0)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert not stop.requested()


def test_a_signal_that_cannot_be_handled_is_refused_and_the_others_are_left_as_they_were() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(InvalidArgumentError, match=r"SIGKILL.* cannot be handled"):
        rankless.preemption(signal.SIGUSR1, signal.SIGKILL)
    assert signal.getsignal(signal.SIGUSR1) is before


def test_another_thread_than_the_main_one_is_told_that_it_cannot() -> None:
    errors: list[Exception] = []

    def listen() -> None:
        try:
            rankless.preemption()
        except InvalidArgumentError as error:
            errors.append(error)

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])


# ---------------------------------------------------------------------------------------------------------------
# The agreement, between simulated ranks: threads with a store in memory


def prompt(store: Store) -> DeadlineStore:
    return DeadlineStore(store, DaemonExecutor("store"), 20.0)


class Simulated:
    """A rank: its training, the thread beside it, and when it is told to stop."""

    def __init__(self, store: DeadlineStore, rank: int, size: int, told_at: int | None, pace: float) -> None:
        self._calls = StepConsensus(Session(store, rank, size, 20.0), store)
        self._told_at, self._pace, self._told, self._done = told_at, pace, False, False
        self._random = random.Random(rank)
        self.stopped_at: int | None = None
        self.threads = [threading.Thread(target=self._beside, daemon=True)]

    def train(self, steps: int, collective: Callable[[], object]) -> None:
        for step in range(steps):
            self._told |= step == self._told_at
            collective()
            time.sleep(self._random.uniform(0, self._pace))
            if self._calls.count_step():
                self.stopped_at = step
                break
        self._done = True

    def _beside(self) -> None:
        while not self._done:
            if self._told:
                self._calls.request_stop()
            if self._calls.is_stop_requested():
                self._calls.agree_on_step()
                return
            time.sleep(self._random.uniform(0, 0.002))
        self._calls.leave()


@given(data=st.data())
@settings(max_examples=examples(60))
def test_ranks_stop_at_the_same_step_whoever_is_told_and_however_far_apart_they_are(data: st.DataObject) -> None:
    size, steps = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 15))
    reported = data.draw(st.lists(st.none() | st.integers(0, steps), min_size=size, max_size=size))
    paces = data.draw(st.lists(st.sampled_from([0.0, 0.0005, 0.005]), min_size=size, max_size=size))
    barrier = threading.Barrier(size, timeout=20.0)
    collective: Callable[[], object] = barrier.wait if data.draw(st.booleans()) else lambda: None
    store = prompt(HashStore())
    ranks = [Simulated(store, rank, size, reported[rank], paces[rank]) for rank in range(size)]
    threads = [threading.Thread(target=rank.train, args=(steps, collective), daemon=True) for rank in ranks]
    threads += [thread for rank in ranks for thread in rank.threads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
        assert not thread.is_alive()
    assert len({rank.stopped_at for rank in ranks}) == 1
    if set(reported) == {None}:
        assert ranks[0].stopped_at is None


def test_a_rank_that_does_not_answer_is_named_within_the_timeout() -> None:
    store = prompt(HashStore())
    calls = [StepConsensus(Session(store, rank, 3, 0.5), store) for rank in range(3)]
    calls[1].request_stop()
    threads = [threading.Thread(target=calls[rank].agree_on_step) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    started = time.monotonic()
    for rank in (0, 1):
        with pytest.raises(RankTimeoutError, match=r"^rank 2 did not answer"):
            all(not calls[rank].count_step() for _ in range(10_000_000))
    assert time.monotonic() - started < 5


def test_a_rank_that_has_left_is_not_waited_for() -> None:
    store = prompt(HashStore())
    first, second = (StepConsensus(Session(store, rank, 2, 20.0), store) for rank in range(2))
    assert [first.count_step() for _ in range(3)] == [False] * 3
    first.leave()
    second.request_stop()
    second.agree_on_step()
    assert [second.count_step() for _ in range(5)] == [False, False, False, True, True]


class Lost(Store):
    """A store whose process has died."""

    def check(self, *_: object) -> bool:
        raise dist.DistNetworkError("connection reset")

    def set(self, *_: object) -> None:
        raise dist.DistNetworkError("connection reset")


def test_counting_does_not_touch_the_store() -> None:
    calls = StepConsensus(Session(prompt(Lost()), 0, 2, 5.0), prompt(Lost()))
    assert not any(calls.count_step() for _ in range(1000))


class Lonely:
    """The ranks of a job that has lost its store."""

    def open_session(self, timeout: float) -> Session:
        return Session(prompt(Lost()), 0, 2, timeout)


def test_losing_the_store_does_not_stop_the_training_unless_it_was_told_to() -> None:
    with Preemption([signal.SIGUSR1], Lonely(), 5.0) as stop:  # type: ignore[arg-type]
        ends = time.monotonic() + 1.2
        while time.monotonic() < ends:
            assert not stop.requested()
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(RankFailedError, match="store was lost"):
            wait_for(stop)


def wait_for(stop: Any) -> int:
    """How many calls it took, one each millisecond."""
    for number in range(10_000):
        if stop.requested():
            return number
        time.sleep(0.001)
    raise AssertionError("nobody was told to stop")


# ---------------------------------------------------------------------------------------------------------------
# Real ranks


def train(path: str, reported: dict[int, int]) -> tuple[int, bool]:
    """Train until told to stop, and save then. The step, and whether a signal came to this very rank."""
    model, rank = {"w": torch.zeros(3)}, dist.get_rank()
    with rankless.preemption(signal.SIGTERM) as stop:
        for step in range(100_000):
            if reported.get(rank) == step:
                os.kill(os.getpid(), signal.SIGTERM)
            dist.all_reduce(torch.ones(1))
            model["w"] += 1
            if stop.requested():
                rankless.save_checkpoint(path, f"step_{step}", model, user_content={"step": step}, async_save=True)
                break
    rankless.finalize()
    return step, rank in reported


@pytest.mark.parametrize("told", [{0: 5}, {1: 300}, {2: 0}, {0: 10, 2: 900}, {0: 3, 1: 3, 2: 3}])
def test_any_rank_is_told_and_all_stop_with_one_complete_checkpoint(
    ranks: Ranks, tmp_path: Path, told: dict[int, int]
) -> None:
    (step,) = {step for step, _ in ranks(3, train, str(tmp_path), told)}
    assert step >= min(told.values())
    (checkpoint,) = rankless.list_checkpoints(tmp_path)
    assert (checkpoint.tag, checkpoint.status) == (f"step_{step}", "complete")
    model = {"w": torch.zeros(3)}
    assert rankless.load_checkpoint(tmp_path, model=model) == {"step": step}
    assert torch.equal(model["w"], torch.full((3,), step + 1.0))


def undisturbed() -> list[bool]:
    with rankless.preemption() as stop:
        return [stop.requested() for _ in range(2000)]


def test_nobody_stops_who_is_not_told_to(ranks: Ranks) -> None:
    assert ranks(3, undisturbed) == [[False] * 2000] * 3


def told_at_the_end(late: float) -> int:
    """A signal comes to rank 1 in the last step, when others may have gone already."""
    number = 0
    with rankless.preemption() as stop:
        for _ in range(50):
            number += stop.requested()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(late)
    return number


@pytest.mark.parametrize("late", [0.0, 1.2])
def test_a_signal_that_comes_too_late_holds_up_nobody(ranks: Ranks, late: float) -> None:
    started = time.monotonic()
    assert ranks(3, told_at_the_end, late) == [0] * 3
    assert time.monotonic() - started < 30


def ended_early(rank: int, port: int) -> None:
    """Rank 0 comes to its end, and has closed nothing; then a signal comes to rank 1."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    stop = rankless.preemption(timeout=20.0)
    assert not stop.requested()
    if rank == 1:
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(stop)


def test_a_process_of_multiprocessing_that_has_ended_is_not_waited_for() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [CONTEXT.Process(target=ended_early, args=(rank, store.port)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]


def silent() -> None:
    """Rank 2 does not call preemption()."""
    if dist.get_rank() == 2:
        time.sleep(3)
        return
    with rankless.preemption(signal.SIGTERM, timeout=1.0) as stop:
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        wait_for(stop)


def test_a_rank_that_is_not_there_is_named(ranks: Ranks) -> None:
    *errors, nothing = ranks.outcomes(3, silent)
    assert nothing is None
    for error in errors:
        assert isinstance(error, RankTimeoutError)
        assert str(error).startswith("rank 2 did not answer within the timeout")
