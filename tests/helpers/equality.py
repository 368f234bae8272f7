"""Comparison of tensors bit for bit."""

from __future__ import annotations

import torch


def equal_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit: NaNs, signs of zeros and dtypes that cannot be compared, too."""
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        return False
    rows = [t.detach().clone(memory_format=torch.contiguous_format).reshape(-1) for t in (actual, expected)]
    bits = [row.view(torch.uint8) for row in rows]
    return torch.equal(*bits)
