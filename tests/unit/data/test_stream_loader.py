"""Tests of streams: in each epoch every sample is used once, whatever ranks, workers and batches use it."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rankless
from rankless.data import stream_loader
from rankless.data.stream_progress import Shard, StreamPlan, StreamProgress
from rankless.errors import InvalidArgumentError, MismatchError, StateError

#: The number of samples of each shard.
LENGTHS = [3, 0, 7, 1, 5, 4, 6, 2]


def read(shard: int, start: int) -> Iterator[int]:
    """Yield samples that say where they are from."""
    for number in range(start, LENGTHS[shard]):
        yield 100 * shard + number


class SomeRank:
    """Stands in for the ranks of a process group: one of them."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def make(rank: int = 0, size: int = 1, **options: Any) -> rankless.StreamLoader:
    with mock.patch.object(stream_loader, "RankGroup", return_value=SomeRank(rank, size)):
        return rankless.StreamLoader(range(len(LENGTHS)), read, **{"batch_size": 2, **options})


def take(loaders: list[rankless.StreamLoader], batches: list[int]) -> list[int]:
    """Return the samples of so many batches of each rank."""
    return [
        int(sample)
        for loader, count in zip(loaders, batches, strict=True)
        for batch in itertools.islice(iter(loader), count)
        for sample in batch
    ]


def whole(epochs: int) -> Counter[int]:
    return Counter({100 * shard + number: epochs for shard, length in enumerate(LENGTHS) for number in range(length)})


def check_used(used: Counter[int], loaders: list[rankless.StreamLoader]) -> None:
    """Check that all samples of the epochs that are over were used once in each, and no sample more often."""
    state = loaders[0].state_dict()
    plan, base = StreamPlan(**state["plan"]), StreamProgress.from_state(state["base"])
    parts = [StreamProgress.from_state(loader.state_dict()["own"]) for loader in loaders]
    joined = plan.join(base, parts)
    expected = whole(joined.epoch)
    for (_, shard), progress in joined.shards.items():
        numbers = range(LENGTHS[shard]) if progress.is_finished else [*range(progress.next), *progress.ahead]
        expected.update(100 * shard + number for number in numbers)
    assert used == +expected


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
    shuffle=st.booleans(),
)
@pytest.mark.filterwarnings("ignore:8 shards are fewer")
def test_every_sample_is_used_once_in_each_epoch_over_any_ranks(sizes: list[int], seed: int, shuffle: bool) -> None:
    numbers, used = random.Random(seed), Counter[int]()
    states: list[dict[str, Any]] = []
    for size in sizes:
        buffer = numbers.choice([0, 3, 8])
        options = {"batch_size": numbers.randint(1, 4), "shuffle_buffer": buffer, "seed": seed, "shuffle": shuffle}
        loaders = [make(rank, size, **options) for rank in range(size)]
        if states:
            for loader in loaders:
                loader.load_state_dicts(states)
        used.update(take(loaders, [numbers.randint(0, 8)] * size))  # training steps are common to all ranks
        states = [loader.state_dict() for loader in loaders]
    check_used(used, loaders)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_what_workers_have_read_ahead_is_not_lost(workers: int) -> None:
    loader, used = make(num_workers=workers), Counter[int]()
    for _ in range(4):  # each time anew, in the middle of everything
        used.update(take([loader], [3]))
        following = make(num_workers=workers)
        following.load_state_dict(loader.state_dict())
        loader = following
    check_used(used, [loader])
    used.update(take([loader], [20]))
    assert used >= whole(1)
    check_used(used, [loader])


@pytest.mark.parametrize("seed", range(6))
def test_a_buffer_may_be_left_out_after_a_resume(seed: int) -> None:
    """A worker has read shards to their ends then whose samples were not all used."""
    used, state = Counter[int](), None
    for buffer, batches in ((8, 3 + seed), (0, 5 + seed), (0, 30)):
        loader = make(shuffle_buffer=buffer, seed=seed)
        if state is not None:
            loader.load_state_dict(state)
        used.update(take([loader], [batches]))
        state = loader.state_dict()
    check_used(used, [loader])


def test_shards_without_samples_end_no_training() -> None:
    def read_few(shard: int, start: int) -> Iterator[int]:
        return iter(range(start, 0 if shard == 1 else 3))

    loader = rankless.StreamLoader(range(4), read_few, 2, num_workers=4)
    assert len(list(itertools.islice(loader, 300))) == 300


def test_a_worker_with_short_shards_gets_others_in_the_next_epoch() -> None:
    lengths = [100, 2, 100, 2]

    def read_other(shard: int, start: int) -> Iterator[int]:
        return iter(range(1000 * shard + start, 1000 * shard + lengths[shard]))

    loader = rankless.StreamLoader(range(4), read_other, 2, shuffle=False, num_workers=2)
    used = Counter(int(sample) for batch in itertools.islice(loader, 1000) for sample in batch)
    assert max(used.values()) <= 2 * min(used.values())
    assert len(loader.state_dict()["own"]["finished"]) < 10


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_random_numbers_of_workers_differ_between_ranks_and_positions(start: str) -> None:
    loaders = [make(rank, 2, collate_fn=draw, num_workers=1, multiprocessing_context=start) for rank in (0, 1)]
    drawn = [number for loader in loaders for number in itertools.islice(loader, 3)]
    drawn += list(itertools.islice(loaders[0], 3))
    assert len(set(drawn)) == 9
    again = make(0, 2, collate_fn=draw, num_workers=1, multiprocessing_context=start)
    assert list(itertools.islice(again, 3)) == drawn[:3]


def draw(_: object) -> float:
    return random.random() + float(torch.rand(()))


def test_an_interrupted_iteration_goes_on_with_the_next_sample() -> None:
    loader = make(shuffle=False)
    assert take([loader], [2]) == [0, 1, 2, 200]
    assert take([loader], [1]) == [201, 202]
    assert loader.epoch == 0
    take([loader], [12])
    assert loader.epoch == 1


def test_the_order_of_shards_depends_on_the_seed_and_the_epoch() -> None:
    plan = StreamPlan(8, 3, shuffle=True)
    assert plan.order(0) == StreamPlan(8, 3, shuffle=True).order(0)
    assert plan.order(0) != plan.order(1)
    assert plan.order(0) != StreamPlan(8, 4, shuffle=True).order(0)


def test_a_buffer_changes_the_order_and_nothing_else() -> None:
    plain, shuffled = (take([make(shuffle=False, shuffle_buffer=size)], [14]) for size in (0, 6))
    assert plain != shuffled
    assert sorted(plain)[:20] == sorted(whole(1))[:20]


@pytest.mark.parametrize("size", [0, 1, 6, 1000])
@pytest.mark.parametrize("stop", [0, 7])
def test_a_buffer_ends_with_its_epoch(size: int, stop: int) -> None:
    """So a training on one rank that ends with its epoch has used each sample once, also after a resume."""
    total, loader = sum(LENGTHS), make(batch_size=1, shuffle_buffer=size)
    used = take([loader], [stop])
    following = make(batch_size=1, shuffle_buffer=size)
    following.load_state_dict(loader.state_dict())
    samples = used + take([following], [2 * total - stop])
    assert Counter(samples[:total]) == Counter(samples[total:]) == whole(1)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_has_ended_when_its_last_sample_was_used(workers: int) -> None:
    loader = rankless.StreamLoader([2, 4], lambda shard, start: iter(range(start, shard)), num_workers=workers)
    used = []
    for batch in loader:
        used.append(batch)
        if loader.epoch == 1:
            break
    assert len(used) == (6 if not workers else 8)  # the worker with the short shard reads on meanwhile


@pytest.mark.parametrize(
    ("saved", "loaded", "is_same"),
    [
        (["/a/0.tar", "/a/1.tar"], ["/b/c/0.tar", "/b/c/1.tar"], True),
        (["/a/0.tar", "/a/1.tar"], ["/a/1.tar", "/a/0.tar"], False),
        (["/a/0.tar", "/a/1.tar"], ["/a/0.tar", "/a/2.tar"], False),
        (["a/x.tar", "b/x.tar"], ["b/x.tar", "a/x.tar"], False),
        (["s3://b/a/x", "s3://b/b/x"], ["/data/a/x", "/data/b/x"], True),
        ([Path("/a/x")], [Path("/b/x")], True),
        ([3, 4], [4, 3], False),
        ([{"a": 1}, {"b": 1}], [{"b": 1}, {"a": 1}], True),  # of these nothing is known
    ],
)
def test_other_shards_are_another_stream(saved: list[Any], loaded: list[Any], is_same: bool) -> None:
    state = rankless.StreamLoader(saved, read).state_dict()
    loader = rankless.StreamLoader(loaded, read)
    if is_same:
        loader.load_state_dict(state)
    else:
        with pytest.raises(MismatchError, match="other shards, or with the same in another order"):
            loader.load_state_dict(state)
    loader.load_state_dict({key: value for key, value in state.items() if key != "names"})  # of an earlier version


def test_a_state_stays_small() -> None:
    plan = StreamPlan(10_000, 0, shuffle=True)
    progress = StreamProgress()
    shards: list[Shard] = plan.assign_epoch(progress, 0, 0, 1)
    for shard in shards[:-1]:
        progress.shards[shard] = stream_loader.ShardProgress(9, set(), 9)
    state = progress.to_state()
    assert len(repr(state)) < 2700
    assert StreamProgress.from_state(state).of(shards[-1]).length is None
    assert all(StreamProgress.from_state(state).of(shard).is_finished for shard in shards[:-1])


def test_each_rank_begins_an_epoch_in_turn() -> None:
    """Else the first ranks would always have a shard more, and be epochs ahead after a while."""
    plan, base = StreamPlan(8, 0, shuffle=False), StreamProgress()
    counts = [sum(len(plan.assign_epoch(base, epoch, rank, 3)) for epoch in range(30)) for rank in range(3)]
    assert max(counts) - min(counts) <= 1


class TestStatesThatDoNotFit:
    def test_another_number_of_shards(self) -> None:
        other = rankless.StreamLoader(range(3), read)
        with pytest.raises(MismatchError, match="saved with 8 shards, and has 3 now"):
            other.load_state_dict(make().state_dict())

    def test_a_state_of_a_rank_is_missing(self) -> None:
        with pytest.raises(MismatchError, match="position of rank 1 of 2 in the stream is missing"):
            make().load_state_dict(make(0, 2).state_dict())

    def test_ranks_with_the_same_data_that_were_not_equally_far(self) -> None:
        behind, ahead = make(), make()
        take([ahead], [1])
        with pytest.raises(MismatchError, match="not equally far"):
            make().load_state_dicts([behind.state_dict(), ahead.state_dict()])

    def test_ranks_with_the_same_data(self) -> None:
        """Of tensor parallelism, for example."""
        loader = make()
        take([loader], [2])
        following = make()
        following.load_state_dicts([loader.state_dict(), loader.state_dict()])
        assert take([following], [1]) == take([loader], [1])

    def test_another_loader(self) -> None:
        with pytest.raises(MismatchError, match="is no StreamLoader"):
            make().load_state_dict({"position": 3})


def test_an_iteration_ends_when_the_position_is_moved() -> None:
    loader = make()
    batches = iter(loader)
    next(batches)
    loader.load_state_dict(make().state_dict())
    with pytest.raises(StateError, match="this iteration of the data loader is over"):
        next(batches)


def test_a_stream_without_samples_is_an_error() -> None:
    with pytest.raises(StateError, match="no shard of the stream"):
        next(iter(rankless.StreamLoader(["a", "b"], lambda *_: iter(()))))


def test_batches_are_collated_and_pinned_as_by_torch() -> None:
    loader = make(collate_fn=torch.tensor, batch_size=3, shuffle=False)
    assert torch.equal(next(iter(loader)), torch.tensor([0, 1, 2]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be"),
        ({"drop_last": True}, "drop_last: a StreamLoader has no last batch"),
        ({"shuffle_buffer": -1}, "shuffle_buffer must be"),
        ({"sampler": range(2)}, "a StreamLoader decides the order"),
        ({"persistent_workers": True}, "leave it out"),
        ({"shuffle_buffer": True}, "shuffle_buffer must be"),
        ({"in_order": False, "process_group": object()}, "get it in another order"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_invalid_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        make(**options)


def test_shards_are_needed() -> None:
    for shards in ([], "a.jsonl"):
        with pytest.raises(InvalidArgumentError, match="at least one shard"):
            rankless.StreamLoader(shards, read)


def test_ranks_know_that_their_shards_differ() -> None:
    files = ["a.jsonl", "b.jsonl"]
    settings = [rankless.StreamLoader(names, read).common_settings for names in (files, files[::-1], files)]
    assert settings[0] == settings[2] != settings[1]


def test_a_stream_of_one_rank_is_its_own() -> None:
    assert not make().needs_all_states
    assert make(0, 2).needs_all_states


def test_a_state_of_another_loader_is_named() -> None:
    with pytest.raises(MismatchError, match="is no ResumableLoader"):
        rankless.ResumableLoader(range(8)).load_state_dict(make().state_dict())  # type: ignore[arg-type]


def test_fewer_shards_than_workers_are_a_warning() -> None:
    with pytest.warns(UserWarning, match="8 shards are fewer than the 9 workers"):
        make(0, 9)
