"""Weights that several ranks load: each reads what it needs, and together they prove it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

import rankless
from rankless.errors import CorruptCheckpointError, RanklessError, RankMismatchError
from tests.helpers.corruption import flip_tensor_bit
from tests.helpers.fake_http import BUCKET
from tests.helpers.fake_s3 import FakeS3, store_at
from tests.helpers.pool import Ranks

#: More than one block in ``experts``; rounds of a few tensors.
SHAPES = {
    "columns": (512, 256),
    "experts": (8, 1024, 1100),
    "norm": (256,),
    "rows": (512, 256),
    "scale": (),
    "skipped": (64, 64),
}

ROUND_BYTES = 300 * 2**10


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a model, with checksums."""
    generator = torch.Generator().manual_seed(0)
    model = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}
    rankless.save_model(model, tmp_path / "model", shard=True, max_shard_size=500_000)
    return tmp_path / "model"


def part_of(name: str, stored: Tensor, rank: int, size: int) -> Tensor:
    """What a rank needs of a tensor, as an engine with tensor and expert parallelism does."""
    if name == "columns":
        return stored.chunk(size)[rank]
    if name in {"rows", "skipped"}:
        return stored.chunk(size, 1)[rank].t()
    if name == "experts":
        return stored.view(8, 2, 512, 1100)[:, :, :, rank * 275 : rank * 275 + 275] if rank % 2 else stored[rank::size]
    return stored


def load_parts(weights: Iterable[tuple[str, Tensor]], rank: int, size: int) -> dict[str, Tensor]:
    parts = ((name, part_of(name, stored, rank, size)) for name, stored in weights if name != "skipped")
    return {name: torch.zeros(part.shape, dtype=part.dtype).copy_(part) for name, part in parts}


def open_at(path: Path, place: str, load: Callable[..., Any]) -> tuple[Any, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    host = f"host {rank % 2}" if place == "hosts" else "host"
    with (
        mock.patch("rankless.inference.read_rounds._ROUND_BYTES", ROUND_BYTES),
        mock.patch("rankless.inference.open_weights.host_id", return_value=host),
        rankless.open_weights(path, timeout=60) as weights,
    ):
        loaded = load(weights, rank, size)
    return loaded, weights.report


def load_all(path: Path, place: str) -> tuple[dict[str, Tensor], int, int, bool]:
    loaded, report = open_at(path, place, load_parts)
    return loaded, report.needed, report.read, report.verified


def model_of(folder: Path) -> dict[str, Tensor]:
    return {name: stored for file in folder.glob("*.safetensors") for name, stored in load_file(file).items()}


def check(results: list[Any], folder: Path) -> None:
    stored = model_of(folder)
    for rank, (loaded, needed, _, is_verified) in enumerate(results):
        expected = load_parts(stored.items(), rank, len(results))
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[name], expected[name]) for name in expected)
        assert needed == sum(part.nbytes for part in expected.values())
        assert is_verified


def count_used(folder: Path) -> int:
    return sum(tensor.nbytes for name, tensor in model_of(folder).items() if name != "skipped")


@pytest.mark.parametrize("place", ["disk", "hosts"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_each_rank_gets_its_part_and_all_blocks_are_verified(ranks: Ranks, folder: Path, place: str, n: int) -> None:
    results = ranks(n, load_all, folder, place)
    check(results, folder)
    if place == "hosts" and n > 1:
        assert sum(read for _, _, read, _ in results) <= count_used(folder)


def test_from_a_store_each_byte_is_read_once(ranks: Ranks, folder: Path) -> None:
    fake = FakeS3()
    with fake.served() as url:
        path = store_at(url, retry_seconds=20.0).path(f"{BUCKET}/model")
        rankless.save_model(model_of(folder), path, shard=True)
        results = ranks(4, load_all, path, "store")
    check(results, folder)
    assert sum(read for _, _, read, _ in results) <= count_used(folder)


@pytest.mark.parametrize("place", ["disk", "hosts"])
@pytest.mark.parametrize("name", [name for name in SHAPES if name != "skipped"])
def test_a_flipped_bit_is_refused_on_all_ranks_and_named(ranks: Ranks, folder: Path, name: str, place: str) -> None:
    (file,) = [file for file in folder.glob("*.safetensors") if name in load_file(file)]
    flip_tensor_bit(file, name)
    for outcome in ranks.outcomes(4, load_all, folder, place):
        assert isinstance(outcome, CorruptCheckpointError)
        assert f"{name!r} in {file}" in str(outcome)
        assert "do not match their CRC" in str(outcome)


def test_a_bit_that_no_rank_uses_is_not_looked_at(ranks: Ranks, folder: Path) -> None:
    (file,) = [file for file in folder.glob("*.safetensors") if "skipped" in load_file(file)]
    flip_tensor_bit(file, "skipped")
    check(ranks(4, load_all, folder, "disk"), folder)


def load_on_stage(weights: Iterable[tuple[str, Tensor]], rank: int, size: int) -> dict[str, Tensor]:
    """A stage of a pipeline takes some tensors whole, and stops when it has them."""
    loaded = {}
    for number, (name, stored) in enumerate(weights):
        if number % size == rank:
            loaded[name] = torch.zeros(stored.shape, dtype=stored.dtype).copy_(stored)
        if number == rank:
            break
    return loaded


def stage(path: Path, place: str) -> dict[str, Tensor]:
    loaded: dict[str, Tensor] = open_at(path, place, load_on_stage)[0]
    return loaded


@pytest.mark.parametrize("place", ["disk", "hosts"])
def test_ranks_may_take_other_tensors_and_stop_early(ranks: Ranks, folder: Path, place: str) -> None:
    with rankless.open_weights(folder) as weights:
        names = [name for name, _ in weights]
    stored = model_of(folder)
    for rank, loaded in enumerate(ranks(4, stage, folder, place)):
        assert loaded.keys() == {names[rank]}
        assert torch.equal(loaded[names[rank]], stored[names[rank]])


def load_in_another_order(weights: Iterable[tuple[str, Tensor]], rank: int, size: int) -> dict[str, Tensor]:
    ordered = sorted(weights, key=lambda item: item[0], reverse=rank % 2 == 1)
    loaded = load_parts(ordered, rank, size)
    loaded["columns"].mul_(1)  # an early use on all ranks, at another time
    return loaded


def reordered(path: Path, place: str) -> tuple[dict[str, Tensor], int, int, bool]:
    loaded, report = open_at(path, place, load_in_another_order)
    return loaded, report.needed, report.read, report.verified


@pytest.mark.parametrize("place", ["disk", "hosts"])
def test_loaders_may_sort_first_and_use_what_they_load(ranks: Ranks, folder: Path, place: str) -> None:
    check(ranks(4, reordered, folder, place), folder)


def fail_on_rank_2(weights: Iterable[tuple[str, Tensor]], rank: int, size: int) -> dict[str, Tensor]:
    taken = []
    for name, stored in weights:
        taken.append((name, stored))
        if rank == 2 and len(taken) == 3:
            raise ValueError("no such layer")
    return load_parts(taken, rank, size)


def fail(path: Path, place: str) -> None:
    open_at(path, place, fail_on_rank_2)


@pytest.mark.parametrize("place", ["disk", "hosts"])
def test_an_error_of_one_loader_ends_all(ranks: Ranks, folder: Path, place: str) -> None:
    outcomes = ranks.outcomes(4, fail, folder, place)
    assert isinstance(outcomes[2], ValueError)
    for rank in (0, 1, 3):
        assert isinstance(outcomes[rank], RanklessError)
        assert "rank 2" in str(outcomes[rank])
        assert "no such layer" in str(outcomes[rank])


def load_other_folders(path: Path) -> None:
    with rankless.open_weights(path / f"{dist.get_rank()}.safetensors", timeout=60):
        pass


def test_ranks_that_open_other_folders_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    for rank in range(2):
        save_file({"w": torch.zeros(2)}, tmp_path / f"{rank}.safetensors")
    for outcome in ranks.outcomes(2, load_other_folders, tmp_path):
        assert isinstance(outcome, RankMismatchError)
        assert "ranks disagree about the path" in str(outcome)


def lose_file(path: Path, place: str) -> None:
    real = os.preadv

    def preadv(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if dist.get_rank() == 1 and sum(map(len, buffers)) > 1000:
            raise OSError(5, "Input/output error")
        return real(fd, buffers, offset, flags)

    with mock.patch("os.preadv", preadv):
        open_at(path, place, load_parts)


@pytest.mark.parametrize("place", ["disk", "hosts"])
def test_a_rank_that_cannot_read_ends_all(ranks: Ranks, folder: Path, place: str) -> None:
    for outcome in ranks.outcomes(4, lose_file, folder, place):
        assert isinstance(outcome, RanklessError)
        assert "Input/output error" in str(outcome)


def fail_early(path: Path, failing: int) -> None:
    def load(weights: Iterable[tuple[str, Tensor]], rank: int, size: int) -> dict[str, Tensor]:
        for number, _ in enumerate(weights):
            if rank == failing and number == 1:
                raise ValueError("no such layer")
        return {}

    with mock.patch("rankless.inference.read_rounds._ROUND_BYTES", 1):  # a round for each tensor
        open_at(path, "disk", load)


@pytest.mark.parametrize("failing", [0, 1])
def test_ranks_do_not_wait_for_the_rounds_after_a_failed_one(ranks: Ranks, folder: Path, failing: int) -> None:
    start = time.monotonic()
    outcomes = ranks.outcomes(3, fail_early, folder, failing)
    assert time.monotonic() - start < 30  # the timeout is 60
    assert all("no such layer" in str(outcome) for outcome in outcomes)


def meet_after_a_break(path: Path) -> list[Tensor]:
    def load(weights: Iterable[tuple[str, Tensor]], rank: int, size: int) -> list[Tensor]:
        loaded = []
        for number, (_, stored) in enumerate(weights):
            loaded.append(torch.zeros(stored.shape, dtype=stored.dtype).copy_(stored))
            if rank == 0 and number == 1:
                break
        used = [tensor * 1 for tensor in loaded]
        dist.barrier()
        return used

    loaded: list[Tensor] = open_at(path, "disk", load)[0]
    return loaded


def test_a_rank_that_has_enough_may_wait_for_the_others(ranks: Ranks, folder: Path) -> None:
    with rankless.open_weights(folder) as weights:
        names = [name for name, _ in weights]
    stored = model_of(folder)
    for rank, loaded in enumerate(ranks(3, meet_after_a_break, folder)):
        assert len(loaded) == (2 if rank == 0 else len(names))
        assert all(torch.equal(tensor, stored[name]) for name, tensor in zip(names, loaded, strict=False))


def scatter(path: Path) -> Tensor:
    with rankless.open_weights(path, timeout=60) as weights:
        received = torch.zeros(128, 256, dtype=torch.bfloat16)
        parts = list(dict(weights)["columns"].chunk(4))
        dist.scatter(received, parts if dist.get_rank() == 0 else None)
    return received


def test_a_loader_may_scatter_a_stored_tensor(ranks: Ranks, folder: Path) -> None:
    stored = model_of(folder)["columns"]
    assert torch.equal(torch.cat(ranks(4, scatter, folder)), stored)
