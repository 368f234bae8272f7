"""Tests saving and resuming data loaders within an epoch: torchdata's on as many ranks, rankless's on any number."""

import multiprocessing as mp
import os
import random
import re
import subprocess
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import rankless
from rankless.errors import InvalidArgumentError, MismatchError, RankMismatchError, StateError
from tests.helpers.pairwise import each_value, first_of
from tests.helpers.pool import Ranks


class Numbers(Dataset[list[float]]):
    """Samples that tell their number, and what a random transform drew for each."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> list[float]:
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: NPY002
        return [float(index), float(os.getpid()), *drawn]


def collate(samples: list[list[float]]) -> torch.Tensor:
    """A row each: the number, the process that read it, four random numbers."""
    return torch.cat([torch.tensor(samples, dtype=torch.float64), torch.rand(len(samples), 1)], dim=1)


def loader(**options: Any) -> rankless.ResumableLoader:
    return rankless.ResumableLoader(Numbers(23), 3, collate_fn=collate, **options)


def numbers(batches: Any) -> list[int]:
    return [int(row[0]) for batch in batches for row in batch]


def drawn(batches: Any) -> list[list[float]]:
    """All but the process."""
    return [[row[0].item(), *row[2:].tolist()] for batch in batches for row in batch]


def interrupted(path: Path, first: Any, make: Any, *, after: int) -> list[Any]:
    """The batches of an epoch, in the middle of which the loader and the process are exchanged for others."""
    before = list(islice(first, after))
    rankless.save_checkpoint(path, "s", dataloader=first)
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)  # noqa: NPY002
    second = make()
    restored = rankless.restore(path, dataloader=second, rng=True)
    assert restored.exact == ("rng", "dataloader")
    return before + list(second)


@each_value({"after": [0, 1, 5, 7], "workers": [0, 2]})
def test_the_rest_of_an_epoch_is_the_same_after_a_resume_random_transforms_included(
    tmp_path: Path, workers: int, after: int
) -> None:
    def make() -> rankless.ResumableLoader:
        return loader(num_workers=workers, seed=4)

    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    expected = drawn(make())
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    assert drawn(interrupted(tmp_path, make(), make, after=after)) == expected
    assert len({row[1] for row in expected}) == len(expected)


def test_batches_are_those_of_a_plain_loader_over_the_same_order() -> None:
    ours = loader(shuffle=False, drop_last=True)
    plain = torch.utils.data.DataLoader(Numbers(23), 3, drop_last=True, collate_fn=collate)
    assert numbers(ours) == numbers(plain)
    assert len(ours) == len(plain) == 7


@pytest.mark.parametrize("workers", [0, 2])
def test_what_workers_have_read_ahead_does_not_count(workers: int) -> None:
    ours = loader(num_workers=workers, prefetch_factor=4 if workers else None)
    batches = iter(ours)
    for number in range(1, 4):
        batch = next(batches)
        assert ours.state_dict()["consumed"] == 3 * number
    assert not workers or batch[0, 1] != os.getpid()


def test_epochs_follow_each_other_without_a_gap() -> None:
    ours = loader()
    epochs = []
    for epoch in range(3):
        assert ours.epoch == epoch
        epochs.append(numbers(ours))
    assert [len(epoch) for epoch in epochs] == [24, 24, 21]
    stream = [*epochs[0], *epochs[1], *epochs[2]]
    assert all(sorted(stream[at : at + 23]) == list(range(23)) for at in (0, 23, 46))


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_is_drawn_from_the_generators_of_the_training(workers: int) -> None:
    """Else the training would draw other numbers after a resume, which makes one more iterator."""
    ours = rankless.ResumableLoader(range(9), 3, num_workers=workers)  # type: ignore[arg-type]
    before = torch.get_rng_state(), random.getstate()
    assert sorted(sample for batch in ours for sample in batch.tolist()) == list(range(9))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


@first_of(2, "start", ["fork", "forkserver", "spawn"])
def test_workers_live_through_a_signal_that_goes_to_all_processes_of_a_job(start: str) -> None:
    """``torchrun`` and Slurm send it to all of them; a loader that lost its workers would end the training."""
    ours = loader(num_workers=2, persistent_workers=True, multiprocessing_context=start)
    batches = iter(ours)
    seen = numbers(islice(batches, 2))  # one from each: they are there
    workers = ours._loader._iterator._workers  # type: ignore[union-attr]
    for worker in workers:
        subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
        subprocess.run(["kill", "-USR1", str(worker.pid)], check=True)
    assert len(set(seen + numbers(batches))) == 23
    for worker in workers:
        worker.terminate()  # as the training process does when it ends
        worker.join(30)
        assert worker.exitcode == 0


def test_no_one_is_shielded_who_is_not_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mp, "parent_process", lambda: None)  # pytest itself may run in a child
    with pytest.raises(InvalidArgumentError, match="worker_init_fn"):
        rankless.shield_worker()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iteration_ends_with_an_error_if_the_position_is_loaded_meanwhile(workers: int) -> None:
    """A rollback in the loop: the rest of the old iteration must not move the position that was loaded."""
    ours = loader(num_workers=workers, shuffle=False)
    batches = iter(ours)
    seen = numbers(islice(batches, 2))
    position = ours.state_dict()
    numbers(islice(batches, 3))
    ours.load_state_dict(position)
    with pytest.raises(StateError, match="iterate over the loader again"):
        next(batches)
    assert ours.state_dict() == position
    assert sorted(seen + numbers(ours)) == [0, *range(23)]  # the epoch's last batch is filled up


def test_the_last_batch_of_an_iteration_does_not_hide_that_the_position_was_loaded() -> None:
    ours = loader()
    start = ours.state_dict()
    batches = iter(ours)
    assert len(list(islice(batches, len(ours)))) == 8
    ours.load_state_dict(start)
    with pytest.raises(StateError, match="iterate over the loader again"):
        next(batches)
    assert ours.state_dict() == start


def test_of_two_iterations_at_once_the_older_one_is_over() -> None:
    ours = loader(shuffle=False)
    first, second = iter(ours), iter(ours)
    seen = numbers([next(first), next(second)])
    with pytest.raises(StateError, match="a new iteration"):
        next(first)
    assert sorted(seen + numbers(second)) == [0, *range(23)]


def part_of_an_epoch(path: str, tag: str | None, steps: int, batch: int) -> tuple[list[list[int]], Any]:
    """Go on from a checkpoint for some steps, save, and read ahead a little more, which is lost."""
    ours = rankless.ResumableLoader(range(61), batch, seed=2)  # type: ignore[arg-type]
    restored = rankless.restore(path, dataloader=ours) if tag else None
    batches = [batch.tolist() for batch in islice(ours, steps)]
    rankless.save_checkpoint(path, f"after_{tag}", dataloader=ours)
    next(iter(ours))
    return batches, restored and (restored.exact, restored.reconstructed, restored.missing)


def test_four_then_two_then_three_ranks_see_every_sample_once(ranks: Ranks, tmp_path: Path) -> None:
    legs = [
        ranks(4, part_of_an_epoch, str(tmp_path), None, 3, 3),
        ranks(2, part_of_an_epoch, str(tmp_path), "1", 4, 2),
        ranks(3, part_of_an_epoch, str(tmp_path), "2", 99, 3),
    ]
    seen = [sample for leg in legs for batches, _ in leg for batch in batches for sample in batch]
    assert len(seen) == 36 + 16 + 9
    assert sorted(seen) == list(range(61))
    for leg in legs[1:]:
        assert [reported for _, reported in leg] == [((), ("dataloader",), ())] * len(leg)


def steps(path: str | None, number: int, drop_last: bool) -> list[list[int]]:
    ours = rankless.ResumableLoader(range(10), 2, drop_last=drop_last)  # type: ignore[arg-type]
    return [batch.tolist() for _ in range(number) for batch in ours]


def test_all_ranks_have_as_many_batches_of_the_same_size(ranks: Ranks) -> None:
    """Or a rank would wait for ever in a collective. 10 samples, 6 of them in a step."""
    filled = ranks(3, steps, None, 3, False)
    assert [[len(batch) for batch in rank] for rank in filled] == [[2] * 5] * 3
    stream = [sample for step in zip(*filled, strict=True) for batch in step for sample in batch]
    assert all(sorted(stream[at : at + 10]) == list(range(10)) for at in (0, 10, 20))
    dropped = ranks(3, steps, None, 3, True)
    assert [[len(batch) for batch in rank] for rank in dropped] == [[2] * 3] * 3


def subgroup() -> tuple[int, list[int]]:
    """Ranks of one tensor-parallel model, neighbours here, read the same samples."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    ours = rankless.ResumableLoader(range(8), 2, process_group=groups[dist.get_rank() % 2])  # type: ignore[arg-type]
    return dist.get_rank(), next(iter(ours)).tolist()


def test_data_is_shared_out_among_the_ranks_of_the_group_given(ranks: Ranks) -> None:
    batches = [batch for _, batch in ranks(4, subgroup)]
    assert batches[0] == batches[1] != batches[2] == batches[3]


def test_a_position_is_not_taken_into_another_dataset(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "s", dataloader=loader())
    with pytest.raises(MismatchError, match=r"saved with 23 samples, and the dataset has 24"):
        rankless.restore(tmp_path, dataloader=rankless.ResumableLoader(Numbers(24), 3))


def steps_of_two_loaders(path: str, until: int) -> list[tuple[list[int], list[int]]]:
    """Train on a stream and a dataset at once. Return the samples of both in each step."""
    stream = rankless.StreamLoader([0, 1, 2, 3, 4, 5], read_hundreds, batch_size=1)
    data = rankless.ResumableLoader(Numbers(24), 1, collate_fn=collate)
    model, taken = torch.nn.Linear(2, 2), []
    with rankless.Checkpointer(
        path, model=model, dataloader={"stream": stream, "data": data}, save_every=1
    ) as checkpointer:
        steps = range(checkpointer.resume() + 1, until + 1)
        for step, first, second in zip(steps, stream, data, strict=False):
            taken.append((first.tolist(), numbers([second])))
            checkpointer.step(step)
    return taken


def read_hundreds(shard: int, start: int) -> Iterator[int]:
    return iter(range(100 * shard + start, 100 * shard + 4))


def test_several_loaders_go_on_on_other_ranks(ranks: Ranks, tmp_path: Path) -> None:
    taken = []
    for size, until in ((2, 3), (2, 6), (1, 18)):
        taken += [step for one in ranks(size, steps_of_two_loaders, str(tmp_path), until) for step in one]
    samples = [sorted(sample for step in taken for sample in step[loader]) for loader in (0, 1)]
    assert samples == [sorted(100 * shard + number for shard in range(6) for number in range(4)), list(range(24))]


@pytest.mark.parametrize(
    ("loaders", "message"),
    [
        ({}, "a dict of them by name"),
        ({1: None}, "a dict of them by name"),
        ({"a": torch.nn.Linear(1, 1)}, "'a' is a Linear, which has no load_state_dicts"),
        ({"a": 3}, "the data loader must have state_dict"),
    ],
)
def test_a_dict_of_other_objects_is_refused(tmp_path: Path, loaders: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        rankless.save_checkpoint(tmp_path, "s", {"w": torch.ones(1)}, dataloader=loaders)


def test_loaders_of_other_names_are_told(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "s", {"w": torch.ones(1)}, dataloader={"a": loader()})
    for others in ({"b": loader()}, {"a": loader(), "b": loader()}):
        with pytest.raises(MismatchError, match="saved were: 'a'"):
            rankless.restore(tmp_path, None, {"w": torch.ones(1)}, dataloader=others)
    with pytest.raises(MismatchError, match="no ResumableLoader"):
        rankless.restore(tmp_path, None, {"w": torch.ones(1)}, dataloader=loader())


def pass_a_stream_as_stateful(path: str) -> None:
    stream = rankless.StreamLoader([0, 1, 2], read_hundreds)
    with pytest.raises(InvalidArgumentError, match=r"'b' is a data loader, .* pass it as dataloader="):
        rankless.save_checkpoint(path, "s", {"w": torch.ones(1)}, stateful={"b": stream})


def test_a_stream_is_no_stateful_object(ranks: Ranks, tmp_path: Path) -> None:
    """Each rank has a position, and a stateful object has the same state on all ranks."""
    ranks(2, pass_a_stream_as_stateful, str(tmp_path))


def resume_with_new_data(path: str, samples: int, new_ok: list[str]) -> tuple[int, list[str], list[int]]:
    """Resume and train for two steps. Return the first step, what is missing, and the samples of this rank."""
    model, data = torch.nn.Linear(2, 2), rankless.ResumableLoader(Numbers(samples), 2, shuffle=False)
    taken: list[int] = []
    with rankless.Checkpointer(path, model=model, dataloader=data, save_every=2) as checkpointer:
        start = checkpointer.resume(new_ok=new_ok)
        restored = checkpointer.restored
        for step, batch in zip(range(start + 1, start + 3), data, strict=False):
            taken += numbers([batch])
            checkpointer.step(step)
    return start, [] if restored is None else list(restored.missing), taken


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.filterwarnings("ignore:loaded")
def test_a_training_goes_on_with_new_data_if_that_is_asked_for(ranks: Ranks, tmp_path: Path, size: int) -> None:
    first = ranks(size, resume_with_new_data, str(tmp_path), 20, [])
    with pytest.raises(AssertionError) as raised:
        ranks(size, resume_with_new_data, str(tmp_path), 24, [])
    assert re.search(r"20 samples, and the dataset has 24 now.*\n.*allow_missing", str(raised.value.__cause__))
    second = ranks(size, resume_with_new_data, str(tmp_path), 24, ["dataloader"])
    assert [taken for *_, taken in second] == [taken for *_, taken in first]
    assert all((start, missing) == (2, ["dataloader"]) for start, missing, _ in second)


def test_a_position_that_means_nothing_is_found_before_anything_is_changed(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "s", {"w": torch.ones(3)}, dataloader=loader())
    weights = {"w": torch.zeros(3)}
    with pytest.raises(MismatchError, match="saved with 23 samples"):
        rankless.restore(tmp_path, model=weights, dataloader=rankless.ResumableLoader(Numbers(24), 3))
    assert not weights["w"].any()


def test_positions_that_differ_are_not_split_anew() -> None:
    left, other = loader(), loader()
    next(iter(other))
    with pytest.raises(MismatchError, match="different positions"):
        loader().load_state_dicts([left.state_dict(), left.state_dict(), other.state_dict()])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": [1]}, "sampler: a ResumableLoader decides the order"),
        ({"in_order": False}, "in_order=False"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": None}, "batch_size"),
        ({"seed": -1}, "seed"),
        ({"batch_size": 30, "drop_last": True}, "no batch of 30"),
        ({"dataset": iter([1])}, "a length and an index"),
        ({"dataset": Numbers(0)}, "0 samples"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        rankless.ResumableLoader(**({"dataset": Numbers(23), "batch_size": 3} | options))


# ---------------------------------------------------------------------------------------------------------------
# torchdata's


def stateful(workers: int) -> StatefulDataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    return StatefulDataLoader(
        Numbers(23), 3, shuffle=True, num_workers=workers, collate_fn=collate, generator=generator
    )


@each_value({"after": [1, 5, 8], "workers": [0, 2]})
def test_torchdatas_loader_goes_on_in_the_middle_of_an_epoch(tmp_path: Path, workers: int, after: int) -> None:
    expected = numbers(stateful(workers))
    actual = numbers(interrupted(tmp_path, stateful(workers), lambda: stateful(workers), after=after))
    assert actual == expected
    assert sorted(actual) == list(range(23))


def distributed(path: str, load: bool, **options: Any) -> tuple[list[int], tuple[str, ...]]:
    dataset = Numbers(24)
    ours = StatefulDataLoader(dataset, 3, sampler=StatefulDistributedSampler(dataset), collate_fn=collate)
    missing = rankless.restore(path, dataloader=ours, **options).missing if load else ()
    before = numbers(islice(ours, 2))
    if not load:
        rankless.save_checkpoint(path, "s", dataloader=ours)
    return before, missing


def elsewhere(path: str) -> tuple[str, list[str], tuple[str, ...]]:
    """On another number of ranks: the error, the warnings if it may be missing, and what is."""
    with pytest.raises(MismatchError, match="dataloader") as raised:
        distributed(path, load=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, missing = distributed(path, load=True, allow_missing=("dataloader",))
    messages = [str(warning.message) for warning in caught if "not all that was asked for" in str(warning.message)]
    return str(raised.value), messages, missing


def test_torchdatas_loaders_of_several_ranks_are_kept_apart_and_other_numbers_of_ranks_are_told(
    ranks: Ranks, tmp_path: Path
) -> None:
    before = ranks(2, distributed, str(tmp_path), False)
    after = ranks(2, distributed, str(tmp_path), True)
    seen = [sample for leg in (before, after) for batch, _ in leg for sample in batch]
    assert sorted(seen) == list(range(24))
    assert [missing for _, missing in after] == [()] * 2
    results = ranks(3, elsewhere, str(tmp_path))
    reason = "dataloader: 2 ranks saved, 3 load, and StatefulDataLoader has no load_state_dicts(states)"
    for message, _, missing in results:
        assert reason in message
        assert "allow_missing=('dataloader',)" in message
        assert missing == ("dataloader",)
    (warned,), *others = [reported for _, reported, _ in results]
    assert (reason in warned, others) == (True, [[], []])


def save_with_batch_sizes(path: Path, batch_sizes: list[int]) -> None:
    ours = rankless.ResumableLoader(Numbers(23), batch_sizes[dist.get_rank()])
    rankless.save_checkpoint(path, "a", {"w": torch.zeros(1)}, dataloader=ours)


def test_ranks_with_different_batch_sizes_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    """Their slices of the samples would overlap."""
    for error in ranks.outcomes(2, save_with_batch_sizes, tmp_path, [4, 2]):
        assert isinstance(error, RankMismatchError)
        assert re.search("settings of the data loader: rank 0 has batch_size=4.*, rank 1 has batch_size=2", str(error))
    ranks(2, save_with_batch_sizes, tmp_path, [4, 4])


def save_with_batch_sizes_of_groups(path: Path, batch_sizes: list[int]) -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group: Any = groups[dist.get_rank() % 2]
    ours = rankless.ResumableLoader(Numbers(23), batch_sizes[dist.get_rank()], process_group=group)
    rankless.save_checkpoint(path, "a", {"w": torch.zeros(1)}, dataloader=ours)


def test_the_ranks_of_each_group_that_shares_data_are_compared(ranks: Ranks, tmp_path: Path) -> None:
    for error in ranks.outcomes(4, save_with_batch_sizes_of_groups, tmp_path, [4, 2, 4, 3]):
        assert isinstance(error, RankMismatchError)
        assert re.search("settings of the data loader: rank 1 has batch_size=2.*, rank 3 has batch_size=3", str(error))
    ranks(4, save_with_batch_sizes_of_groups, tmp_path, [4, 2, 4, 2])  # groups may read other data
