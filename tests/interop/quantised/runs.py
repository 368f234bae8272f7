"""Trainings with optimizers of any package: one model whose states are quantized, and one step that all ranks take."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

Run = tuple[nn.Module, torch.optim.Optimizer]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def make_model(rows: int = 200, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The states of the first weight are quantized: it has a block in each row. Those of the others are too small."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, rows), nn.ReLU(), nn.Linear(rows, 3)).to(dtype)


def shard_model(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def start_run(make: MakeOptimizer, *, sharded: bool = False, **options: Any) -> Run:
    model = make_model(**options)
    model = shard_model(model) if sharded else model
    return model, make(model.parameters())


def train_steps(run: Run, first: int, stop: int) -> None:
    """Take some steps, eagerly. Every rank has the same batch, so the average of the gradients is that of one rank."""
    model, optimizer = run
    with torch.compiler.set_stance("force_eager"):
        for step in range(first, stop):
            batch = torch.randn(8, 256, generator=torch.Generator().manual_seed(step))
            model(batch.to(next(model.parameters()).dtype)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def trained_tensors(run: Run) -> dict[str, torch.Tensor]:
    """The parameters, whole."""
    return {name: whole_tensor(parameter) for name, parameter in run[0].named_parameters()}


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def state_tensors(run: Run) -> dict[str, torch.Tensor]:
    """The states of an unsharded optimizer; of tensor subclasses their inner tensors, and what these stand for."""
    model, optimizer = run
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors |= flat_tensors(f"{name}/{key}", value)
    return tensors


def flat_tensors(name: str, value: Any) -> dict[str, torch.Tensor]:
    if not hasattr(value, "__tensor_flatten__"):
        return {name: torch.as_tensor(value).detach().clone()}
    inner = {key: getattr(value, key) for key in value.__tensor_flatten__()[0]}
    values = value.get_original_weight() if hasattr(value, "get_original_weight") else value.dequantize()
    return functools.reduce(
        dict.__or__, (flat_tensors(f"{name}.{key}", tensor) for key, tensor in inner.items()), {name: values}
    )


def assert_equal_bits(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(_as_bytes(actual[name]), _as_bytes(tensor)), name


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
