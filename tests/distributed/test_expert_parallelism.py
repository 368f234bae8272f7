"""Tests experts on meshes of their own, next to dense layers on all ranks; some ranks hold no expert."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import rankless
from tests.helpers.file_contents import read_state_files
from tests.helpers.layouts import (
    LayoutRun,
    blank_run,
    expected_tensor,
    fill_run,
    local_tensor,
    make_moments,
    named_tensors,
)
from tests.helpers.pairwise import first_of
from tests.helpers.pool import Ranks

EXPERTS, INSIDE, OUTSIDE = 5, 6, 4


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(INSIDE, EXPERTS)
        self.up = nn.Parameter(torch.zeros(EXPERTS, INSIDE, OUTSIDE))
        self.down = nn.Parameter(torch.zeros(EXPERTS, OUTSIDE, INSIDE, dtype=torch.bfloat16))


def spread(model: nn.Module, name: str, mesh: DeviceMesh, placements: list[Any]) -> None:
    """A parameter becomes a DTensor; a rank outside of the mesh has an empty part of it."""
    whole = getattr(model, name).detach()
    part = torch.empty(0, dtype=whole.dtype)
    if mesh.get_coordinate() is not None:
        part = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
    stride = whole.stride()
    spread = DTensor.from_local(part, mesh, placements, run_check=False, shape=whole.shape, stride=stride)
    setattr(model, name, nn.Parameter(spread))


def build(layout: str) -> LayoutRun:
    model = Mixture()
    n = dist.get_world_size() if dist.is_initialized() else 1
    if layout == "ep":
        mesh, placements = DeviceMesh("cpu", torch.arange(n)), [Shard(0)]
    elif layout == "some":
        mesh, placements = DeviceMesh("cpu", torch.arange(1, n)), [Shard(0)]
    elif layout == "ep and tp":
        mesh, placements = DeviceMesh("cpu", torch.arange(n).view(n // 2, 2)), [Shard(0), Shard(2)]
    elif layout == "replicated":
        mesh, placements = DeviceMesh("cpu", torch.arange(n).view(2, -1).T.contiguous()), [Shard(0), Replicate()]
    if layout != "plain":
        for name in ("up", "down"):
            spread(model, name, mesh, placements)
        fully_shard(model.router)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    return LayoutRun(model, optimizer, [model], [optimizer])


CASES = [("plain", 1), ("ep", 4), ("some", 3), ("ep and tp", 4), ("replicated", 4)]  # each layout once
CASES += [("ep", 2), ("ep", 8), ("some", 4), ("ep and tp", 8), ("replicated", 8)]


def save(path: str, layout: str) -> None:
    run = fill_run(build(layout))
    rankless.save_checkpoint(path, "s", run.model, run.optimizer)


def load(path: str, layout: str, exchange: str) -> None:
    run = blank_run(build(layout))
    rankless.load_checkpoint(path, model=run.model, optimizer=run.optimizer, share_reads=exchange)
    mine, oracle = dict(named_tensors(run)), dict(named_tensors(fill_run(build(layout))))
    assert mine.keys() == oracle.keys()
    for name, tensor in mine.items():
        assert torch.equal(local_tensor(tensor), local_tensor(oracle[name])), name


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts")
    save(str(path), "plain")
    return path


def test_the_oracle_tells_experts_apart() -> None:
    up = expected_tensor("model/up", (EXPERTS, INSIDE, OUTSIDE), torch.float32)
    assert len({float(item.sum()) for item in up}) == EXPERTS
    assert make_moments("up", up)["exp_avg"].shape == up.shape


@first_of(5, ("layout", "n"), CASES)
def test_they_are_saved_and_loaded_whoever_holds_them(
    ranks: Ranks, tmp_path: Path, expected: Path, layout: str, n: int
) -> None:
    ranks(n, save, str(tmp_path), layout)
    assert read_state_files(tmp_path / "s") == read_state_files(expected / "s")
    for exchange in ("never", "always"):
        ranks(n, load, str(expected), layout, exchange)
