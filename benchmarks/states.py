"""The saved states: named tensors, and models with an optimizer in several layouts over the ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

GB = 10**9

#: The bytes of a float32 parameter with AdamW: itself and two moments.
_BYTES = 12

#: The number of tensors in the case of many small ones, of 1024 float32 numbers each.
SMALL = 20_000


def build_large_tensors(nbytes: int) -> dict[str, torch.Tensor]:
    """Return eight large tensors."""
    return {f"layer.{number}.weight": torch.randn(nbytes // 4 // 8) for number in range(8)}


def build_small_tensors(count: int = SMALL) -> dict[str, torch.Tensor]:
    """Return very many tensors of 4 KiB."""
    return {f"tensor.{number:05d}": torch.full((1024,), float(number)) for number in range(count)}


class Block(nn.Module):
    """The parameters of a layer of a Llama-like model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = width * 11 // 4
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        self.before, self.after = nn.RMSNorm(width), nn.RMSNorm(width)


class Llama(nn.Module):
    """The parameters of a Llama-like model of about ``nbytes`` with AdamW."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        width, words = 1024, max(1024, nbytes // _BYTES // 8 // 1024)
        block = sum(parameter.numel() for parameter in Block(width).parameters())
        layers = max(1, round((nbytes / _BYTES - 2 * words * width) / block))
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, words, bias=False)


def build_weights(nbytes: int) -> Llama:
    """Return a Llama-like model whose weights alone have about ``nbytes``."""
    return Llama(nbytes * _BYTES // 4)


_STYLES: dict[str, type[ParallelStyle]] = {
    **dict.fromkeys(("q", "k", "v", "gate", "up"), ColwiseParallel),
    **dict.fromkeys(("o", "down"), RowwiseParallel),
}


def _apply_fsdp2(model: Llama) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def _apply_tensor_parallel(model: Llama) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        parallelize_module(layer, mesh, {name: style() for name, style in _STYLES.items()})
    return model


def _apply_both(model: Llama) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    for layer in model.layers:
        parallelize_module(layer, mesh["tensor"], {name: style() for name, style in _STYLES.items()})
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return model


LAYOUTS: dict[str, Callable[[Llama], nn.Module]] = {
    "plain": lambda model: model,
    "DDP": DistributedDataParallel,
    "FSDP2": _apply_fsdp2,
    "TP": _apply_tensor_parallel,
    "FSDP2 x TP": _apply_both,
}


def build_training(layout: str, nbytes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a Llama-like model and its AdamW after a step, of about ``nbytes`` over all ranks."""
    torch.manual_seed(0)  # replicas must be equal
    model = LAYOUTS[layout](Llama(nbytes))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def list_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return all tensors of both by name, as they are in memory: the input of peers."""
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    tensors = dict(bare.state_dict())
    for name, parameter in bare.named_parameters():
        tensors |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    return tensors


def list_local_bytes(state: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return this rank's shard of each tensor, as bytes."""
    shards = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in state.values())
    return [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in shards]
