"""Experts on a mesh dimension of their own, as torchtitan lays them out: bytes that are known on each rank.

Each rank's part of a tensor is computed from its rank alone, with the rule by which ``torch.chunk`` divides.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Shard, distribute_tensor

import rankless
from tests.helpers.file_contents import read_state_files
from tests.helpers.layouts import local_tensor
from tests.helpers.pairwise import first_of
from tests.helpers.pool import Ranks
from tests.helpers.shard_bytes import Box, cut, numbered
from tests.helpers.torch_limits import HAS_UNFLATTEN, SHARDS_UNEVENLY

INSIDE, OUTSIDE = 6, 4

#: The box of this rank of each kind of tensor.
Boxes = dict[str, Box]


class Layer(nn.Module):
    """A router and its experts, of which all matrices are one parameter."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(INSIDE, experts, bias=False)
        self.experts = nn.Module()
        self.experts.up = nn.Parameter(torch.zeros(experts, INSIDE, OUTSIDE))
        self.experts.down = nn.Parameter(torch.zeros(experts, OUTSIDE, INSIDE))


class Span:
    """A range of rows or columns, divided as ``torch.chunk`` does it."""

    def __init__(self, size: int, start: int = 0) -> None:
        self.start, self.size = start, size

    def part(self, number: int, count: int) -> Span:
        step = -(-self.size // count)
        start = min(number * step, self.size)
        return Span(min(step, self.size - start), self.start + start)


def _boxes(rows: Span, router: Span, up: Span | None = None, down: Span | None = None) -> Boxes:
    """The rows of the experts and of the router, and the columns of both matrices of an expert."""
    up, down = up or Span(INSIDE), down or Span(OUTSIDE)
    return {
        "router.weight": ((router.start, 0), (router.size, INSIDE)),
        "experts.up": ((rows.start, up.start, 0), (rows.size, up.size, OUTSIDE)),
        "experts.down": ((rows.start, down.start, 0), (rows.size, down.size, INSIDE)),
    }


def _spread(experts: nn.Module, mesh: DeviceMesh, up: list[Placement], down: list[Placement]) -> None:
    for name, placements in (("up", up), ("down", down)):
        spread = distribute_tensor(getattr(experts, name).detach(), mesh, placements, src_data_rank=None)
        setattr(experts, name, nn.Parameter(spread))


def _sub_meshes(layer: Layer, experts: int) -> Boxes:
    """Both dimensions are sub-meshes of one mesh, which is flattened for the router."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("efsdp", "ep"))
    _spread(layer.experts, mesh["ep"], [Shard(0)], [Shard(0)])
    fully_shard(layer.experts, mesh=mesh["efsdp"])
    fully_shard(layer, mesh=mesh._flatten("fsdp"))
    rows = Span(experts).part(rank % 2, 2).part(rank // 2, world // 2)
    return _boxes(rows, Span(experts).part(rank, world))


def _columns(layer: Layer, experts: int) -> Boxes:
    """FSDP2 divides the second dimension of the experts, as torchtitan does it for few experts."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("efsdp", "ep"))
    _spread(layer.experts, mesh["ep"], [Shard(0)], [Shard(0)])
    fully_shard(layer.experts, mesh=mesh["efsdp"], shard_placement_fn=lambda _: Shard(1))
    fully_shard(layer, mesh=mesh._flatten("fsdp"))
    up, down = (Span(size).part(rank // 2, world // 2) for size in (INSIDE, OUTSIDE))
    return _boxes(Span(experts).part(rank % 2, 2), Span(experts).part(rank, world), up, down)


def _outer(layer: Layer, experts: int) -> Boxes:
    """Neighbours are ranks of FSDP2: the dimension of the experts is the outer one."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("ep", "efsdp"))
    _spread(layer.experts, mesh["ep"], [Shard(0)], [Shard(0)])
    fully_shard(layer.router, mesh=mesh["efsdp"])
    number, inner = divmod(rank, world // 2)
    return _boxes(Span(experts).part(number, 2), Span(experts).part(inner, world // 2))


def _flattened(layer: Layer, experts: int) -> Boxes:
    """The dimension of the experts is made of those of data and tensor parallelism."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    _spread(layer.experts, mesh._flatten("ep"), [Shard(0)], [Shard(0)])
    fully_shard(layer.router, mesh=mesh["dp"])
    return _boxes(Span(experts).part(rank, world), Span(experts).part(rank // 2, world // 2))


def _divided_experts(layer: Layer, experts: int) -> Boxes:
    """Each expert is divided over a second dimension, its two matrices in different ways."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("ep", "etp"))
    _spread(layer.experts, mesh, [Shard(0), Shard(1)], [Shard(0), Shard(1)])
    fully_shard(layer.router, mesh=mesh._flatten("fsdp"))
    up, down = (Span(size).part(rank % 2, 2) for size in (INSIDE, OUTSIDE))
    return _boxes(Span(experts).part(rank // 2, world // 2), Span(experts).part(rank, world), up, down)


def _replicated(layer: Layer, experts: int) -> Boxes:
    """Ranks of the outer dimension hold the same experts, and the same part of the router."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world // 2, 1, 2), mesh_dim_names=("replicate", "efsdp", "ep"))
    _spread(layer.experts, mesh["ep"], [Shard(0)], [Shard(0)])
    fully_shard(layer.experts, mesh=mesh["replicate", "efsdp"])
    fully_shard(layer.router, mesh=mesh["replicate", "ep"])
    return _boxes(Span(experts).part(rank % 2, 2), Span(experts).part(rank % 2, 2))


def _unflattened(layer: Layer, experts: int) -> Boxes:
    """The two dimensions are made of the one that the router has."""
    world, rank = dist.get_world_size(), dist.get_rank()
    whole = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    mesh = whole._unflatten(0, (world // 2, 2), ("efsdp", "ep"))
    _spread(layer.experts, mesh["ep"], [Shard(0)], [Shard(0)])
    fully_shard(layer.experts, mesh=mesh["efsdp"])
    fully_shard(layer, mesh=whole)
    rows = Span(experts).part(rank % 2, 2).part(rank // 2, world // 2)
    return _boxes(rows, Span(experts).part(rank, world))


def _whole(_: Layer, experts: int) -> Boxes:
    return _boxes(Span(experts), Span(experts))


LAYOUTS: dict[str, Callable[[Layer, int], Boxes]] = {
    "sub-meshes": _sub_meshes,
    "columns": _columns,
    "outer": _outer,
    "flattened": _flattened,
    "divided experts": _divided_experts,
    "replicated": _replicated,
    **({"unflattened": _unflattened} if HAS_UNFLATTEN else {}),
    "whole": _whole,
}


def _start(layout: str, experts: int) -> tuple[Layer, torch.optim.AdamW, Boxes]:
    layer = Layer(experts)
    boxes = LAYOUTS[layout](layer, experts)
    optimizer = torch.optim.AdamW(layer.parameters(), foreach=False)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return layer, optimizer, boxes


def _each_tensor(
    layer: Layer, optimizer: torch.optim.AdamW, boxes: Boxes
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The part that this rank holds of each parameter and moment, and what it should be."""
    tensors = {}
    for place, (name, parameter) in enumerate(layer.named_parameters()):
        for number, key in enumerate(("", "exp_avg", "exp_avg_sq")):
            tensor = optimizer.state[parameter][key] if key else parameter
            full = numbered(*parameter.shape) + 1000 * (3 * place + number)
            tensors[f"{name} {key}"] = local_tensor(tensor.detach()), cut(full, *boxes[name])
    return tensors


def save(path: Path, layout: str, experts: int) -> None:
    layer, optimizer, boxes = _start(layout, experts)
    for part, expected in _each_tensor(layer, optimizer, boxes).values():
        part.copy_(expected)
    rankless.save_checkpoint(path, "s", layer, optimizer)


def load(path: Path, layout: str, experts: int) -> list[str]:
    """The names of what differs from what this rank should hold."""
    layer, optimizer, boxes = _start(layout, experts)
    restored = rankless.restore(path, "s", layer, optimizer)
    assert {"model", "optimizer"} <= {*restored.exact}
    tensors = _each_tensor(layer, optimizer, boxes)
    return [name for name, (part, expected) in tensors.items() if not torch.equal(part, expected)]


CASES = [("sub-meshes", 6), ("columns", 8), *product([name for name in LAYOUTS if name != "whole"], [8, 6])]


@first_of(2, "layout, experts", dict.fromkeys(CASES))
def test_experts_of_four_ranks_are_those_of_two_and_of_one(
    ranks: Ranks, tmp_path: Path, layout: str, experts: int
) -> None:
    if experts == 6 and not SHARDS_UNEVENLY:
        pytest.skip("this torch cannot divide experts unevenly in two steps")
    ranks(4, save, tmp_path / "4", layout, experts)
    save(tmp_path / "1", "whole", experts)
    assert read_state_files(tmp_path / "4/s") == read_state_files(tmp_path / "1/s")
    assert load(tmp_path / "4", "whole", experts) == []
    assert ranks(2, load, tmp_path / "4", layout, experts) == [[]] * 2
    assert ranks(4, load, tmp_path / "1", layout, experts) == [[]] * 4
