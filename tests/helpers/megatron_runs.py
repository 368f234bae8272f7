"""Trainings that resume from Megatron's checkpoints: modules with Megatron's names, in one process and sharded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import rankless


def build_module(shapes: Mapping[str, tuple[int, ...]]) -> nn.Module:
    """A module with parameters of these names."""
    root = nn.Module()
    for name, shape in shapes.items():
        module, parts = root, name.split(".")
        for part in parts[:-1]:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(parts[-1], nn.Parameter(torch.full(shape, 9.0)))
    return root


def build_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """Megatron's two groups: no weight decay for biases and parameters of one dimension."""
    named = list(module.named_parameters())
    decayed = [parameter for name, parameter in named if parameter.ndim > 1 and not name.endswith(".bias")]
    others = [parameter for name, parameter in named if parameter.ndim == 1 or name.endswith(".bias")]
    return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.5}], lr=1.0)


def resume_sharded(path: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, Tensor], Any]:
    """Load into a module under FSDP2. Return the whole tensors, and the groups of the optimizer."""
    module = build_module(shapes)
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = build_optimizer(module)
    rankless.load_checkpoint(path, model=module, optimizer=optimizer)
    return gather_tensors(module, optimizer), [_settings(group) for group in optimizer.param_groups]


def gather_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The parameters and their states, by ``kind/name`` as the oracles have them."""
    tensors = {}
    for name, parameter in module.named_parameters():
        tensors[f"master/{name}"] = _whole(parameter)
        for state, value in optimizer.state[parameter].items():
            tensors[f"{state}/{name}"] = _whole(value)
    return tensors


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in ("lr", "weight_decay", "betas", "eps")}
