"""The model that Lightning trains in the tests, without Lightning: the same names, in any layout of torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

WORDS, WIDTH = 11, 4


class Net(nn.Module):
    """Uneven shapes, a norm, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.up = nn.Linear(WIDTH, 6)
        self.down = nn.Linear(6, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        return self.head(self.norm(hidden + self.down(torch.relu(self.up(hidden)))) * self.scale)


class Module(nn.Module):
    """As a LightningModule has it: the net is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Net()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens)


def make_optimizers(module: nn.Module, kind: str) -> tuple[torch.optim.Optimizer, Any]:
    """Two groups, told by the names of the parameters, and a scheduler."""
    named = list(module.named_parameters())
    decay = [p for name, p in named if name.endswith("weight")]
    rest = [p for name, p in named if not name.endswith("weight")]
    groups = [{"params": decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[kind](groups, lr=0.1)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def parallelize(net: nn.Module, mesh: Any) -> None:
    parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def build_net(layout: str, kind: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A run that has not begun, in a layout."""
    torch.manual_seed(9)
    module: nn.Module = Module()
    if layout == "ddp":
        module = DistributedDataParallel(module)
    elif layout == "fsdp":
        fully_shard(module.model)
    elif layout == "tp":
        parallelize(module.model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return module, *make_optimizers(module, kind)


def gather_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gather_contents(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every tensor of a run, whole, by FQN and state."""
    names = {id(p): name.removeprefix("module.") for name, p in module.named_parameters()}
    actual = {f"model/{name.removeprefix('module.')}": gather_tensor(t) for name, t in module.state_dict().items()}
    for p, states in optimizer.state.items():
        actual |= {
            f"optimizer/{names[id(p)]}/{key}": gather_tensor(t) for key, t in states.items() if torch.is_tensor(t)
        }
    return actual
