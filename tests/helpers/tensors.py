"""Tensors of random bits or of indices, and their bytes."""

from __future__ import annotations

import math

import torch


def random_tensor(shape: list[int] | tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bits at all, but for booleans."""
    generator = torch.Generator().manual_seed(seed)
    top = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, top, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """What a contiguous copy of the tensor holds."""
    return (
        tensor.resolve_conj()
        .resolve_neg()
        .clone(memory_format=torch.contiguous_format)
        .view(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )


def index_tensor(shape: tuple[int, ...]) -> torch.Tensor:
    """Each element is its own place in row-major order."""
    return torch.arange(math.prod(shape)).view(shape)
