"""Promises about what a training has besides its model: its data, and weights that it saves next to checkpoints."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import rankless
from tests.helpers.pool import Ranks
from tests.helpers.stream_training import LENGTHS, make_loader
from tests.promises.places import OPTIONS, PLACES, PLAIN, WAYS, Run, in_new_job, tier_of
from tests.promises.promise import because, promise

_NO_TRAINING = because("a training saves into a run directory", *(PLACES.keys() - WAYS[PLAIN]))

#: The shards of the stream, the samples of the stream and of the dataset, and the samples of a batch.
_SHARDS, _SAMPLES, _BATCH = 12, sum(LENGTHS[:12]), 3


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, number: int) -> int:
        return number


def open_training(place: Run, model: torch.nn.Module, **more: Any) -> rankless.Checkpointer:
    return rankless.Checkpointer(
        place.path, model=model, local=tier_of(place.local), signals=(), **OPTIONS[place.way], **more
    )


def train(place: Run, until: int) -> dict[str, list[int]]:
    """Train on this number of ranks until a step, with two loaders. Return the samples that this rank has used."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    loaders = {"stream": make_loader(count=_SHARDS), "dataset": rankless.ResumableLoader(Numbers(), _BATCH)}
    used: dict[str, list[int]] = {name: [] for name in loaders}
    with open_training(place, model, dataloader=loaders, save_every=2) as checkpointer:
        begin = checkpointer.resume()
        batches = zip(*loaders.values(), strict=False)
        for step, both in enumerate(islice(batches, until - begin), begin + 1):
            for name, batch in zip(loaders, both, strict=True):
                used[name] += batch.tolist()
            checkpointer.step(step)
    return used


@promise(
    "streams and datasets go on after the samples that were used, on any number of ranks: none lost, none twice",
    exempt=_NO_TRAINING,
    in_one_process=True,
)
@pytest.mark.filterwarnings("ignore:loaded")
def test_samples(place: Run, ranks: Ranks) -> None:
    everything = {
        "stream": [1000 * shard + number for shard in range(_SHARDS) for number in range(LENGTHS[shard])],
        "dataset": list(range(_SAMPLES)),
    }
    used: dict[str, list[int]] = {name: [] for name in everything}
    for size, until in ((4, 3), (3, 6), (2, 8)):
        for of_rank in ranks(size, train, in_new_job(place), until):
            for name, samples in of_rank.items():
                used[name] += samples
    for samples in used.values():
        assert len(samples) == len(set(samples)) == _BATCH * (4 * 3 + 3 * 3 + 2 * 2)
    rest = train(in_new_job(place), 8 + (_SAMPLES - len(used["stream"])) // _BATCH)
    for name, samples in everything.items():
        assert sorted(used[name] + rest[name]) == samples


def train_with_weights(place: Run, until: int, tag: str | None = None) -> int:
    """Train as users do: after step N all weights are N. Return the step from which the training went on."""
    model = torch.nn.Linear(2, 2, bias=False)
    weights = {"save_model_every": 2, "models": weights_of(place)}
    with open_training(place, model, save_every=4, **weights) as checkpointer:
        begin = checkpointer.resume(tag)
        for step in range(begin + 1, until + 1):
            with torch.no_grad():
                model.weight.fill_(step)
            checkpointer.step(step)
    return begin


def weights_of(place: Run) -> Path:
    return place.path.parent / "weights"


def current_weights(place: Run) -> dict[int, float]:
    """Return the first element of the current weights by their steps."""
    values = {}
    for info in rankless.list_checkpoints(weights_of(place)):
        if info.is_current:
            model = torch.nn.Linear(2, 2, bias=False)
            rankless.load_model(model, info.path)
            values[int(info.step or 0)] = model.weight[0, 0].item()
    return values


@promise(
    "weights that are saved next to checkpoints are of the branch of the training that goes on, also after a rollback",
    exempt=_NO_TRAINING,
    in_one_process=True,
)
@pytest.mark.filterwarnings("ignore:.*abandoned")
def test_weights_next_to_checkpoints(place: Run, ranks: Ranks) -> None:
    place = in_new_job(place)
    assert set(ranks(2, train_with_weights, place, 8)) == {0}
    assert current_weights(place) == {2: 2.0, 4: 4.0, 6: 6.0, 8: 8.0}
    assert train_with_weights(place, 5, "step_4") == 4
    assert current_weights(place) == {2: 2.0, 4: 4.0}
    assert set(ranks(3, train_with_weights, place, 10)) == {5}
    assert current_weights(place) == {2: 2.0, 4: 4.0, 6: 6.0, 8: 8.0, 10: 10.0}
