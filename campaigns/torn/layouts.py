"""A small model in several layouts, with special parameters: a frozen one, a scalar, a buffer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

#: The number of features of a sample.
WIDTH = 192


class Net(nn.Module):
    """A model of two layers for tensor parallelism, a scalar, a frozen parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(300, 100), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply both layers."""
        out: torch.Tensor = self.down(torch.relu(self.up(x))) * self.scale
        return out


def _apply_fsdp(model: Net) -> Net:
    fully_shard(model.up)
    fully_shard(model.down)
    # Scalars cannot be sharded; each rank keeps them whole.
    fully_shard(model, ignored_params={model.scale})
    return model


def _apply_tensor_parallel(model: Net) -> Net:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


_ADAMW = partial(torch.optim.AdamW, foreach=False)


@dataclass(frozen=True)
class Layout:
    """The parallel layout of the model, the number of ranks, and the kind of optimizer."""

    ranks: int = 1
    wrap: Callable[[Net], Net] = lambda model: model
    optimizer: Callable[..., torch.optim.Optimizer] = _ADAMW


LAYOUTS = {
    "plain": Layout(),
    "fused": Layout(optimizer=partial(torch.optim.AdamW, fused=True)),
    "foreach": Layout(optimizer=partial(torch.optim.AdamW, foreach=True)),
    "FSDP2": Layout(ranks=2, wrap=_apply_fsdp),
    "tensor parallel": Layout(ranks=2, wrap=_apply_tensor_parallel),
}
