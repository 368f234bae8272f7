"""Meshes whose ranks are not in ascending order: each shard is where the process groups of torch place it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import rankless
from rankless.errors import UnsupportedTensorError
from tests.helpers.pairwise import each_value
from tests.helpers.pool import Ranks
from tests.helpers.shard_bytes import cut, dtensor, numbered

#: Meshes of one dimension of four ranks, and of which the groups of both dimensions form a mesh.
ROWS = [[2, 0, 3, 1], [3, 2, 1, 0], [0, 1, 2, 3]]
GRIDS = [[[2, 3], [0, 1]], [[1, 0], [3, 2]], [[3, 1], [2, 0]]]


def _linear(rows: int = 8) -> torch.nn.Linear:
    linear = torch.nn.Linear(4, rows)
    with torch.no_grad():
        linear.weight.copy_(numbered(rows, 4))
        linear.bias.copy_(numbered(rows))
    return linear


def _place_by_groups(mesh: DeviceMesh) -> list[int]:
    """The rank in the process group of each dimension: what torch's collectives gather by."""
    return [dist.get_rank(mesh.get_group(dim)) for dim in range(mesh.ndim)]


def _fsdp_round_trip(folder: Path, ranks: list[Any], rows: int) -> bool:
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "shard")[-torch.tensor(ranks).ndim :])
    model = fully_shard(_linear(rows), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    weight = model.weight.full_tensor()
    moment = optimizer.state[model.weight]["exp_avg"].full_tensor()
    rankless.save_checkpoint(folder, "a", model, optimizer)
    plain = torch.nn.Linear(4, rows)
    plain_optimizer = torch.optim.AdamW(plain.parameters())
    rankless.load_checkpoint(folder, "a", plain, plain_optimizer)
    saved = torch.equal(plain.weight, weight) and torch.equal(plain_optimizer.state[plain.weight]["exp_avg"], moment)
    target = fully_shard(torch.nn.Linear(4, rows), mesh=mesh)
    rankless.load_checkpoint(folder, "a", target)
    return saved and torch.equal(target.weight.full_tensor(), weight)


@each_value({"mesh": [*ROWS, *GRIDS], "rows": [8, 7]})
def test_fsdp2_and_hsdp(ranks: Ranks, tmp_path: Path, mesh: list[Any], rows: int) -> None:
    assert all(ranks(4, _fsdp_round_trip, tmp_path, mesh, rows))


def _tensor_parallel(folder: Path, ranks: list[list[int]]) -> bool:
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"))

    def make() -> torch.nn.Module:
        model = parallelize_module(torch.nn.Sequential(_linear()), mesh["tp"], {"0": ColwiseParallel()})
        return fully_shard(model, mesh=mesh["dp"])

    model = make()
    output = model(torch.ones(4))
    rankless.save_checkpoint(folder, "a", model)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 8))
    rankless.load_checkpoint(folder, "a", plain)
    target = make()
    for parameter in target.parameters():
        torch.nn.init.zeros_(parameter)
    rankless.load_checkpoint(folder, "a", target)
    outputs = [part.full_tensor() if hasattr(part, "full_tensor") else part for part in (output, target(torch.ones(4)))]
    return torch.equal(plain[0].weight, numbered(8, 4)) and torch.equal(*outputs)


@pytest.mark.parametrize("mesh", GRIDS)
def test_fsdp2_with_tensor_parallelism(ranks: Ranks, tmp_path: Path, mesh: list[list[int]]) -> None:
    assert all(ranks(4, _tensor_parallel, tmp_path, mesh))


def _both_dimensions(folder: Path, ranks: list[list[int]]) -> bool:
    mesh = DeviceMesh("cpu", ranks)
    row, column = _place_by_groups(mesh)
    full = numbered(4, 6)
    local = cut(full, (2 * row, 3 * column), (2, 3))
    rankless.save_checkpoint(folder, "a", {"w": dtensor(local, mesh, (Shard(0), Shard(1)), (4, 6))})
    return torch.equal(rankless.open(folder, "a")["model/w"], full)


@pytest.mark.parametrize("mesh", GRIDS)
def test_shards_on_both_dimensions(ranks: Ranks, tmp_path: Path, mesh: list[list[int]]) -> None:
    assert all(ranks(4, _both_dimensions, tmp_path, mesh))


def _flattened(folder: Path, ranks: list[list[int]]) -> bool:
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"))
    flat = mesh._flatten("all")
    (place,) = _place_by_groups(flat)
    full = numbered(8, 2)
    rankless.save_checkpoint(folder, "a", {"w": dtensor(cut(full, (2 * place, 0), (2, 2)), flat, (Shard(0),), (8, 2))})
    return torch.equal(rankless.open(folder, "a")["model/w"], full)


def test_a_flattened_mesh(ranks: Ranks, tmp_path: Path) -> None:
    assert all(ranks(4, _flattened, tmp_path, [[2, 3], [0, 1]]))


def _contradicting(folder: Path, placements: list[str]) -> str:
    mesh = DeviceMesh("cpu", [[0, 3], [2, 1]])
    kinds = [Shard(number) if name == "shard" else Replicate() for number, name in enumerate(placements)]
    tensor = distribute_tensor(numbered(4, 6), mesh, kinds)
    try:
        rankless.save_checkpoint(folder, "a", {"w": tensor})
    except UnsupportedTensorError as error:
        return str(error)
    return "saved" if torch.equal(rankless.open(folder, "a")["model/w"], numbered(4, 6)) else "saved wrongly"


def test_groups_that_form_no_mesh_are_refused_by_name_if_a_tensor_is_sharded_over_both(
    ranks: Ranks, tmp_path: Path
) -> None:
    messages = ranks(4, _contradicting, tmp_path, ["shard", "shard"])
    assert all("'w'" in message and "ascending" in message for message in messages)
    assert ranks(4, _contradicting, tmp_path / "b", ["replicate", "shard"]) == ["saved"] * 4


def _cut_by_torch(folder: Path) -> str:
    mesh = DeviceMesh("cpu", [2, 0, 3, 1])
    tensor = distribute_tensor(numbered(7, 2), mesh, [Shard(0)])
    try:
        rankless.save_checkpoint(folder, "a", {"w": tensor})
    except UnsupportedTensorError as error:
        return str(error)
    return "saved" if torch.equal(rankless.open(folder, "a")["model/w"], numbered(7, 2)) else "saved wrongly"


def test_rows_that_torch_cuts_by_the_mesh_and_sends_by_the_group_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    assert all("'w'" in message and "ascending" in message for message in ranks(4, _cut_by_torch, tmp_path))
