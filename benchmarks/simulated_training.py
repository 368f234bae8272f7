"""A training of FSDP2 with AdamW whose state is zeros, on one rank: real, or the first of a simulated job."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.object_scale import Llama

#: Llama-3 405B, and a model of few bytes, for real processes.
LARGE = Llama("Llama-3 405B", 126, 16_384, 53_248, 1024)
SMALL = Llama("small", 24, 128, 256, 64, vocabulary=512)

#: The ranks of the job of the large model.
LARGE_RANKS = 16_384

_MOMENTS = ("exp_avg", "exp_avg_sq")


def model_of(ranks: int) -> Llama:
    """Return the large model for so many ranks or more; for fewer, one with as many tensors and smaller ones."""
    halvings = max(0, round(math.log2(LARGE_RANKS / ranks) / 2))
    sizes = (LARGE.width, LARGE.hidden, LARGE.keys, LARGE.vocabulary)
    name = f"{LARGE.name}, widths / {2**halvings}" if halvings else LARGE.name
    return Llama(name, LARGE.layers, *(size >> halvings for size in sizes))


@dataclass(frozen=True)
class Training:
    """The objects of one rank to save."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def nbytes(self) -> int:
        """The bytes of this rank's shards."""
        tensors = [tensor for state in self.optimizer.state.values() for tensor in state.values()]
        shards = [*self.model.parameters(), *tensors]
        return sum((shard.to_local() if isinstance(shard, DTensor) else shard).nbytes for shard in shards)

    @torch.no_grad()
    def step(self) -> None:
        """Change everything that a training step changes."""
        for parameter, state in self.optimizer.state.items():
            for tensor in (parameter, *state.values()):
                (tensor.to_local() if isinstance(tensor, DTensor) else tensor).add_(1)
        seed_generators(random.getrandbits(30))


def seed_generators(seed: int) -> None:
    """Seed the generators that are saved."""
    for set_seed in (torch.manual_seed, random.seed, np.random.seed):
        set_seed(seed)


def build_training(model: Llama, ranks: int, rank: int) -> Training:
    """Return the shards of a rank, in bfloat16 with moments in float32, and seed its generators."""
    seed_generators(rank)
    mesh = init_device_mesh("cpu", (ranks,))
    shapes = dict(model.shapes())
    module = nn.Module()
    parameters = {name: nn.Parameter(_shard(shape, torch.bfloat16, mesh)) for name, shape in shapes.items()}
    for name, parameter in parameters.items():
        _register(module, name, parameter)
    optimizer = torch.optim.AdamW(list(parameters.values()))
    for name, parameter in parameters.items():
        optimizer.state[parameter] = _build_state(shapes[name], mesh)
    return Training(module, optimizer)


def _build_state(shape: tuple[int, ...], mesh: DeviceMesh) -> Mapping[str, torch.Tensor]:
    moments = {key: _shard(shape, torch.float32, mesh) for key in _MOMENTS}
    return {"step": torch.zeros(()), **moments}


def _shard(shape: tuple[int, ...], dtype: torch.dtype, mesh: DeviceMesh) -> DTensor:
    step = -(-shape[0] // mesh.size())
    rows = max(0, min(step, shape[0] - step * dist.get_rank()))
    local = torch.zeros((rows, *shape[1:]), dtype=dtype)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride)


def _register(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Register a parameter under a dotted name."""
    *path, last = name.split(".")
    for part in path:
        if not hasattr(module, part):
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(last, parameter)
