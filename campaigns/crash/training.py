"""The saved state: a model and its optimizer, all of whose values are functions of the step."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

_WIDTH, _WIDER = 96, 250

#: The ends of the names of parameters that are not trained.
_FROZEN = ("/base", "/held")

#: A size that gives several files for the model and for the optimizer.
MAX_SHARD_SIZE = 100_000


class Net(nn.Module):
    """A model with 100,000-byte matrices that tensor parallelism shards both ways, and a vector that it does not.

    ``base`` and ``held`` are frozen. The first has a file of its own, the second shares one with the vector.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(_WIDTH, _WIDER, bias=False)
        self.down = nn.Linear(_WIDER, _WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(_WIDTH + 1))
        self.base = nn.Parameter(torch.ones(100, _WIDER), requires_grad=False)
        self.held = nn.Parameter(torch.ones(100, 100), requires_grad=False)


class Training:
    """Models and optimizers in the layout of the number of ranks: plain, FSDP2, or FSDP2 with tensor parallelism."""

    def __init__(self, names: tuple[str, ...]) -> None:
        """Create separate models if there are names."""
        self._nets = {name: _shard_model(Net()) for name in names or ("",)}
        self._optimizers = {name: _build_optimizer(net) for name, net in self._nets.items()}
        self.model: Any = dict(self._nets) if names else self._nets[""]
        self.optimizer: Any = dict(self._optimizers) if names else self._optimizers[""]

    def build_user_content(self, step: int) -> dict[str, Any]:
        """Return the user content of a step."""
        return {"step": step, "curve": build_value(step, "curve", torch.Size([64]))}

    def set_step(self, step: int) -> None:
        """Set all values to those of a step."""
        with torch.no_grad():
            for name, tensor in self._iterate_tensors():
                _assign_values(tensor, build_value(step, name, tensor.shape))
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = float(step)

    def find_differences(self, step: int) -> list[str]:
        """Return the names of values that differ, bit for bit, from those of a step."""
        wrong = [
            name
            for name, tensor in self._iterate_tensors()
            if not torch.equal(tensor, build_value(step, name, tensor.shape))
        ]
        rates = {group["lr"] for optimizer in self._optimizers.values() for group in optimizer.param_groups}
        return wrong if rates == {float(step)} else [*wrong, "lr"]

    def _iterate_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for net_name, net in self._nets.items():
            for name, parameter in net.named_parameters():
                yield f"{net_name}/{name}", parameter
                for key, state in self._optimizers[net_name].state.get(parameter, {}).items():
                    yield f"{net_name}/{name}/{key}", state


@functools.cache
def build_value(step: int, name: str, shape: torch.Size) -> torch.Tensor:
    """Return the values that a tensor of this name has at a step, in any layout.

    Those of frozen tensors change from step 0 to step 1 only.
    """
    step = min(step, 1) if name.endswith(_FROZEN) else step
    generator = torch.Generator().manual_seed(zlib.crc32(f"{step}/{name}".encode()))
    return torch.rand(shape, generator=generator)


def _shard_model(net: Net) -> nn.Module:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks < 2:
        return net
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "tp"))
    if ranks > 2:
        parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    return net


def _build_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    """Return an Adam optimizer with states as after a step."""
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=1.0)
    for parameter in trained:
        like = {key: torch.zeros_like(parameter, requires_grad=False) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.zeros(()), **like}
    return optimizer


def _assign_values(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    if isinstance(tensor, DTensor):
        whole = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
    tensor.copy_(whole)
