"""The modules of drawn training states, and how a layout divides them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.drawn_cases import Case

#: More elements than a value may have that is stored inline: 64 KiB of float32.
LARGE = 20_000

#: What an initializer sets the buffer to that no file has.
SCRATCH = 7.0


#: By kind of a part the modules in it.
_INNER: dict[str, dict[str, Callable[[], nn.Module]]] = {
    "linear": {"inner": partial(nn.Linear, 5, 7)},
    "tied": {"inner": partial(nn.Linear, 5, 7), "head": partial(nn.Linear, 5, 7)},
    "embedding": {"inner": partial(nn.Embedding, 11, 3)},
    "norm": {"inner": partial(nn.LayerNorm, 6)},
    "batchnorm": {"inner": partial(nn.BatchNorm1d, 6)},
    "named": {"_orig_mod": partial(nn.Linear, 3, 3), "module": partial(nn.Linear, 2, 3)},
}


class Part(nn.Module):
    """A module of one kind. Each has a parameter that is trained."""

    def __init__(self, kind: str, size: int) -> None:
        super().__init__()
        self.kind = kind
        for name, make in _INNER.get(kind, {}).items():
            setattr(self, name, make())
        if kind == "tied":
            self.head.weight = self.inner.weight
        if kind == "scalar":
            self.weight = nn.Parameter(torch.rand(()))
        if kind == "frozen":
            self.weight = nn.Parameter(torch.rand(5, 3), requires_grad=False)
        if kind in {"frozen", "buffer", "unset", "extra"}:
            self.gain = nn.Parameter(torch.rand(6))
        self.scales = torch.rand(size)
        if kind in {"buffer", "unset"}:
            self.register_buffer("counts", torch.arange(size))
            self.register_buffer("mean", torch.rand(size))
            self.register_buffer("scratch", torch.full((3,), SCRATCH), persistent=False)

    def reset_parameters(self) -> None:
        if self.kind == "buffer":
            self.scratch.fill_(SCRATCH)

    def get_extra_state(self) -> Any:
        return {"scales": self.scales, "n": 3} if self.kind == "extra" else None

    def set_extra_state(self, state: Any) -> None:
        if self.kind == "extra":
            self.scales = state["scales"]


class Whole(nn.Module):
    """All modules of a case, and a parameter that every layout divides."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8, 4))
        size = LARGE if case.is_large else 4
        for number, kind in enumerate(case.modules):
            setattr(self, f"{kind}{number}", Part(kind, size))


class Stage(nn.Module):
    """Some parts of a model, under the names that they have in it."""

    def __init__(self, whole: Whole, names: list[str]) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, getattr(whole, name))


def lay_out(whole: Whole, layout: str) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the modules of this rank, and what is saved and loaded in their place."""
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    if layout in {"pipeline", "interleaved"}:
        names = ["weight", *(name for name, _ in whole.named_children())]
        stages = [names[len(names) * rank // world : len(names) * (rank + 1) // world]]
        if layout == "interleaved":
            stages = [[name] for name in names[rank::world]]
        modules: list[nn.Module] = [Stage(whole, stage) for stage in stages]
        return modules, modules
    return [whole], [_divide(whole, layout, world)]


def _divide(whole: Whole, layout: str, world: int) -> nn.Module:
    if layout == "plain":
        return whole
    if layout == "ddp":
        return DistributedDataParallel(whole)
    if layout in {"tensor", "reversed", "grid"}:
        return _distribute(whole, layout, list(range(world)))
    rows = 2 if layout == "hsdp" and world == 4 else 1
    mesh = DeviceMesh("cpu", list(range(world)))
    if rows > 1:
        mesh = DeviceMesh("cpu", torch.arange(world).reshape(rows, -1), mesh_dim_names=("replicate", "shard"))
    scalars = {p for p in whole.parameters() if p.ndim == 0}
    return fully_shard(whole, mesh=mesh, ignored_params=scalars)


def _distribute(whole: Whole, layout: str, ranks: list[int]) -> Whole:
    """Divide parameters over a mesh of one dimension or two, as tensor parallelism may."""
    mesh = DeviceMesh("cpu", ranks[:: -1 if layout == "reversed" else 1])
    if layout == "grid":
        mesh = DeviceMesh("cpu", torch.tensor(ranks).reshape(2 if len(ranks) == 4 else 1, -1))
    for module in whole.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            places: list[Placement] = [Replicate()] * mesh.ndim
            if parameter.ndim and name != "bias":
                places = [Shard(min(dim, parameter.ndim - 1)) for dim in range(mesh.ndim)]
            spread = distribute_tensor(parameter.detach(), mesh, places)
            setattr(module, name, nn.Parameter(spread, requires_grad=parameter.requires_grad))
    for module in whole.modules():
        if isinstance(module, Part) and module.kind == "tied":
            module.head.weight = module.inner.weight
    return whole
