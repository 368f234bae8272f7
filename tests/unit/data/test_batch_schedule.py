"""Tests the schedule of training data: every sample of every epoch once, wherever another job takes over."""

from itertools import islice

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rankless.data.batch_schedule import BatchSchedule, SchedulePosition

#: A leg of a run: global batches of so many samples, so many of them.
LEGS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 8)), min_size=1, max_size=6)


def travel(length: int, legs: list[tuple[int, int]], *, drop_last: bool, seed: int = 3) -> list[tuple[int, list[int]]]:
    """The samples of each batch, with the epoch that it begins in, over legs that hand their state to the next."""
    seen: list[tuple[int, list[int]]] = []
    state = BatchSchedule(length, 1, shuffle=True, seed=seed, drop_last=drop_last).to_state(SchedulePosition())
    for batch, number in legs:
        course, at = BatchSchedule(length, batch, shuffle=False, seed=0, drop_last=drop_last).resume_from(state)
        for _ in range(number):
            begin, samples = next(course.batches_from(at))
            seen.append((begin.epoch, samples.tolist()))
            at = course.position_after(at)
        state = course.to_state(at)
    return seen


@given(st.integers(1, 20), LEGS)
def test_every_epoch_has_every_sample_once_whatever_the_batches(length: int, legs: list[tuple[int, int]]) -> None:
    stream = [sample for _, samples in travel(length, legs, drop_last=False) for sample in samples]
    epochs = [stream[at : at + length] for at in range(0, len(stream), length)]
    expected = BatchSchedule(length, 1, shuffle=True, seed=3, drop_last=False)
    for number, epoch in enumerate(epochs):
        assert epoch == expected.epoch_order(number).tolist()[: len(epoch)]
    assert all(sorted(epoch) == list(range(length)) for epoch in epochs[:-1])


@given(st.integers(9, 30), LEGS)
def test_what_is_dropped_is_the_end_of_an_epoch_and_less_than_a_batch(length: int, legs: list[tuple[int, int]]) -> None:
    batches = travel(length, legs, drop_last=True)
    expected = BatchSchedule(length, 1, shuffle=True, seed=3, drop_last=False)
    for epoch in {epoch for epoch, _ in batches}:
        samples = [sample for number, batch in batches for sample in batch if number == epoch]
        assert samples == expected.epoch_order(epoch).tolist()[: len(samples)]
        if epoch < batches[-1][0]:
            assert length - len(samples) < max(batch for batch, _ in legs)


@given(st.integers(1, 20), st.integers(1, 30), st.booleans())
def test_epochs_have_the_number_of_batches_that_is_told(length: int, batch: int, drop_last: bool) -> None:
    course = BatchSchedule(length, batch, shuffle=True, seed=0, drop_last=drop_last)
    if course.count_batches():
        batches = list(islice(course.batches_from(SchedulePosition()), 100))
        assert len(batches) == course.count_batches()
        assert all(len(samples) == batch for _, samples in batches)


def test_the_order_depends_on_the_seed_and_the_epoch() -> None:
    orders = [
        BatchSchedule(50, 1, True, seed, False).epoch_order(epoch).tolist()
        for seed in (0, 1, 2**40)
        for epoch in (0, 1)
    ]
    assert len({tuple(order) for order in orders}) == 6
    assert BatchSchedule(50, 1, False, 0, False).epoch_order(1).tolist() == list(range(50))


def test_the_order_is_the_one_of_version_one() -> None:
    """A run that was saved goes on in the order that it had, whatever is installed since."""
    order = BatchSchedule(12, 1, shuffle=True, seed=2**33 + 5, drop_last=False).epoch_order(7)
    assert order.dtype == np.int64
    assert order.tolist() == [7, 5, 8, 9, 2, 0, 3, 10, 6, 11, 1, 4]
