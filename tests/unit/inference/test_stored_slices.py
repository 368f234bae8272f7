"""Tests parts of stored tensors that are read when they are asked for. The oracle is safetensors' ``get_slice``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from torch import nn

import rankless
from rankless.errors import CorruptCheckpointError, StateError
from rankless.inference.joined_reads import JoinedReads
from rankless.inference.stored_slice import StoredSlice
from tests.helpers.corruption import flip_tensor_bit

INDICES: dict[str, Any] = {
    "all of it": ...,
    "rows": slice(8, 24),
    "columns": (slice(None), slice(3, 7)),
    "a box": (slice(1, 60), slice(5, 6)),
    "one row": 5,
    "nothing": slice(9, 9),
    "a list": [1, 60, 2],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    weight = torch.randn(64, 32).bfloat16()
    rankless.save_model({"weight": weight, "scale": torch.tensor(3.0)}, tmp_path / "model", shard=True)
    return tmp_path / "model"


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_a_part_is_that_of_safetensors(folder: Path, index: Any) -> None:
    with (
        safe_open(folder / "model.safetensors", "pt") as file,
        rankless.open_weights(folder, process_group="self") as weights,
    ):
        theirs, ours = file.get_slice("weight"), weights.slices()["weight"]
        part = ours[index]
        assert type(part) is torch.Tensor
        assert torch.equal(part, theirs[index])
        assert ours.get_shape() == theirs.get_shape() == list(ours.shape)
        assert ours.get_dtype() == theirs.get_dtype()
        assert ours.dtype is part.dtype
        assert ours.is_floating_point()
    assert weights.report.verified
    assert not weights.report.computed or isinstance(index, list)


def test_just_the_part_is_read(tmp_path: Path) -> None:
    rankless.save_model({"w": torch.zeros(1000, 1000), "v": torch.zeros(1000)}, tmp_path / "model", shard=True)
    with rankless.open_weights(tmp_path / "model", verify=False, process_group="self") as weights:
        assert weights.slices()["w"][100:200].shape == (100, 1000)
    assert weights.report.needed == weights.report.read == 400_000


def test_a_scalar(folder: Path) -> None:
    with rankless.open_weights(folder, process_group="self") as weights:
        assert weights.slices()["scale"][...].item() == 3.0


def test_threads_may_read_at_the_same_time(folder: Path) -> None:
    with rankless.open_weights(folder, process_group="self") as weights, ThreadPoolExecutor(4) as pool:
        stored = weights.slices()["weight"]
        rows = list(pool.map(lambda row: stored[row], range(64)))
        assert torch.equal(torch.stack(rows), stored[...])


def test_a_tied_tensor_has_all_of_its_names(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["embed"].weight
    rankless.save_checkpoint(tmp_path, "a", model)
    with rankless.open_weights(tmp_path, process_group="self") as weights:
        parts = {name: stored[...] for name, stored in weights.slices().items()}
    assert parts.keys() == {"embed.weight", "head.weight"}
    assert all(torch.equal(part, model["embed"].weight) for part in parts.values())


def test_a_flipped_bit_is_an_error_at_the_end_of_the_block(folder: Path) -> None:
    flip_tensor_bit(folder / "model.safetensors", "weight")
    with (
        pytest.raises(CorruptCheckpointError, match=r"model tensor 'weight' in .* is corrupt"),
        rankless.open_weights(folder, process_group="self") as weights,
    ):
        weights.slices()["weight"][0]


@pytest.mark.parametrize("use", [lambda stored: stored[...], lambda stored: stored[0]])
def test_a_part_after_the_block_is_an_error(folder: Path, use: Callable[[StoredSlice], object]) -> None:
    with rankless.open_weights(folder, process_group="self") as weights:
        stored = weights.slices()["weight"]
    with pytest.raises(StateError, match="was used after the end"):
        use(stored)


def test_slices_before_the_block_are_an_error(folder: Path) -> None:
    weights = rankless.open_weights(folder, process_group="self")
    with pytest.raises(StateError, match="call slices"):
        weights.slices()


def test_a_thread_that_still_reads_when_the_block_ends_gets_an_error(folder: Path) -> None:
    """What it would get is not verified any more."""
    began, may_end = threading.Event(), threading.Event()
    original = JoinedReads.run

    def run(reads: JoinedReads, *arguments: Any) -> Any:
        began.set()
        may_end.wait(30)
        return original(reads, *arguments)

    with ThreadPoolExecutor(1) as pool:
        with rankless.open_weights(folder, process_group="self") as weights:
            stored = weights.slices()["weight"]
            with mock.patch.object(JoinedReads, "run", run):
                late = pool.submit(lambda: stored[0])
                assert began.wait(30)
        may_end.set()
        with pytest.raises(StateError, match="while a thread was reading"):
            late.result()
