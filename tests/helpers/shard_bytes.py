"""Shards whose bytes are known on each rank, without any code of rankless: made by hand and put into DTensors."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

Box = tuple[tuple[int, ...], tuple[int, ...]]


def numbered(*shape: int) -> torch.Tensor:
    """A tensor whose elements are all different."""
    return torch.arange(1.0, torch.Size(shape).numel() + 1).reshape(shape)


def cut(full: torch.Tensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """A copy of one box of a tensor."""
    return full[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))].clone()


def dtensor(
    local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]
) -> DTensor:
    """A DTensor of ``shape`` with any shard."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def checkpointable(
    tensor: torch.Tensor, shape: tuple[int, ...], parts: list[tuple[Box, tuple[int, ...]]]
) -> torch.Tensor:
    """The tensor with the attributes of torch's ``CheckpointableTensor``: boxes of ``shape``, each with its start."""
    tensor.global_shape = shape  # type: ignore[attr-defined]
    tensor.global_offsets = tuple(box[0] for box, _ in parts)  # type: ignore[attr-defined]
    tensor.local_sizes = tuple(box[1] for box, _ in parts)  # type: ignore[attr-defined]
    tensor.local_offsets = tuple(start for _, start in parts)  # type: ignore[attr-defined]
    return tensor
