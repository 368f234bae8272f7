"""Tests the decisions about heartbeats, which need no ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankless.liveness.heartbeats import SWEPT_RANKS, Ring, SilenceMeter, find_unchanged
from rankless.liveness.rank_loss import LossEvidence, RankLoss
from rankless.liveness.watcher import WatchTimes


@given(st.integers(2, 300), st.data())
def test_each_rank_observes_the_next_that_has_not_left(size: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, size - 1))
    ring, seen = Ring(rank, size), []
    while (observed := ring.observed) is not None:
        seen.append(observed)
        ring.skip()
    assert seen == [*range(rank + 1, size), *range(rank)]
    assert ring.successors == []


@given(st.integers(2, 300), st.data())
def test_the_successors_are_those_after_the_observed_rank(size: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, size - 1))
    ring = Ring(rank, size)
    order = [*range(rank + 1, size), *range(rank)]
    assert ring.successors == order[1 : 1 + SWEPT_RANKS]


@pytest.mark.parametrize("size", [2, 3, 100])
def test_every_rank_is_observed_by_exactly_one(size: int) -> None:
    assert sorted(Ring(rank, size).observed for rank in range(size)) == list(range(size))  # type: ignore[type-var]


def test_silence_is_counted_from_the_last_change() -> None:
    meter = SilenceMeter(longest_gap=2.0)
    assert [meter.observe(value, now) for now, value in enumerate([b"1", b"2", b"2", b"2", b"3"])] == [0, 0, 1, 2, 0]


def test_time_in_which_this_process_was_stopped_is_not_silence_of_others() -> None:
    meter = SilenceMeter(longest_gap=2.0)
    meter.observe(b"1", 0.0)
    assert meter.observe(b"1", 3600.0) == 2.0


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=50))
def test_no_run_of_looks_counts_more_than_the_time_that_passed(gaps: list[float]) -> None:
    meter, now = SilenceMeter(longest_gap=2.0), 0.0
    meter.observe(b"1", now)
    for gap in gaps:
        now += gap
        assert meter.observe(b"1", now) <= min(now, 2.0 * len(gaps)) + 1e-6


def test_only_unchanged_heartbeats_are_silent() -> None:
    assert find_unchanged({1: b"5", 2: b"5", 3: b"9"}, {1: b"5", 2: b"6"}) == [1]


@pytest.mark.parametrize("evidence", LossEvidence)
def test_every_message_names_the_ranks_and_who_noticed_it(evidence: LossEvidence) -> None:
    message = RankLoss((3, 7), evidence, 2, "the detail").message
    assert message.startswith("ranks 3, 7 ")
    assert "the detail" in message
    assert "(noticed by rank 2)" in message


def test_a_call_of_the_store_may_take_longer_than_a_slow_answer() -> None:
    assert WatchTimes(1.0, 30.0).call_seconds == 5.0
    assert WatchTimes(0.1, 0.6).call_seconds == 1.0
