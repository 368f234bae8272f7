"""States whose every element is known: a function of its tensor and its place in it, whatever the layout."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from benchmarks import states

#: The states of a parameter that AdamW keeps beside it, and the bytes of an element.
_MOMENTS, _ITEM = ("exp_avg", "exp_avg_sq"), 4


def build_zeros(layout: str, nbytes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build a model with AdamW of ``nbytes`` over all ranks, of zeros."""
    with torch.device("meta"):
        whole = states.Llama(nbytes)
    model = states.LAYOUTS[layout](whole).to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.data.zero_()
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def fill_state(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Set all elements to those of ``seed``."""
    with torch.no_grad():
        for name, tensor in _list_tensors(model, optimizer):
            _to_local(tensor).copy_(_compute_local(name, tensor, seed))


def find_wrong(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> list[str]:
    """Return the names of the tensors that are not those of ``seed``, bit for bit."""
    return [
        name
        for name, tensor in _list_tensors(model, optimizer)
        if not torch.equal(_to_local(tensor), _compute_local(name, tensor, seed))
    ]


def count_missing(model: nn.Module, optimizer: torch.optim.Optimizer, held: set[int], parts: int) -> int:
    """Return how many bytes of this rank's share of the tensors are not in parts that its host holds.

    The parts are those of FSDP2 on ``parts`` ranks: equal ranges of rows. ``held`` are the ones on this host.
    """
    missing = 0
    for _, tensor in _list_tensors(model, optimizer):
        shape, offset = _find_share(tensor)
        rows = -(-tensor.shape[0] // parts)
        width = _to_local(tensor).numel() // max(1, shape[0])
        for part in set(range(parts)) - held:
            first, last = max(offset[0], part * rows), min(offset[0] + shape[0], (part + 1) * rows)
            missing += max(0, last - first) * width * _ITEM
    return missing


def _list_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()
        for key in _MOMENTS:
            yield f"{name} {key}", optimizer.state[parameter][key]


def _to_local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _find_share(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape and the offset of this rank's shard."""
    if isinstance(tensor, DTensor):
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return tuple(shape), tuple(offset)
    return tuple(tensor.shape), (0,) * tensor.dim()


def _compute_local(name: str, tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Return the elements of a shard: 24 bits of a product of their numbers in the whole tensor, as numbers below 1."""
    shape, offset = _find_share(tensor)
    numbers = torch.zeros(shape, dtype=torch.int64)
    stride = 1
    for dimension in reversed(range(len(shape))):
        along = torch.arange(offset[dimension], offset[dimension] + shape[dimension]) * stride
        numbers += along.reshape([-1 if at == dimension else 1 for at in range(len(shape))])
        stride *= tensor.shape[dimension]
    numbers += zlib.crc32(f"{name} {seed}".encode())
    return numbers.mul_(2654435761).bitwise_right_shift_(8).bitwise_and_(0xFFFFFF).to(torch.float32).mul_(2**-24)
