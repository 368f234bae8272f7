"""Tests the casts of a conversion: their bytes are those that torch makes, apart from NaNs, which become one."""

from itertools import permutations

import numpy as np
import pytest
import torch

from rankless.edits.cast_elements import cast_elements
from rankless.ondisk.dtypes import FLOATING, TORCH_NAMES

#: More than are cast at a time, and no multiple of it.
COUNT = 40_000


def make_elements(dtype: torch.dtype) -> torch.Tensor:
    """Return elements of any bits, of any sign and exponent, and around what is halfway between two of fewer bits."""
    generator = torch.Generator().manual_seed(7)
    bits = torch.randint(0, 256, (COUNT * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    if dtype.itemsize <= 2:
        codes = torch.arange(2 ** (8 * dtype.itemsize), dtype=torch.int32).view(torch.uint8).reshape(-1, 4)
        return torch.cat([codes[:, : dtype.itemsize].reshape(-1), bits]).view(dtype)
    halves = torch.arange(-2000, 2000) * 0.5
    powers = torch.exp2(torch.arange(-150, 130))
    near = (halves[:, None] * powers[None, ::7]).flatten().to(dtype)
    return torch.cat([bits.view(dtype), near, near * (1 + torch.finfo(dtype).eps), near * (1 - torch.finfo(dtype).eps)])


def cast(elements: torch.Tensor, stored: str, dtype: str) -> torch.Tensor:
    target = getattr(torch, TORCH_NAMES[dtype])
    raw, into = elements.view(torch.uint8).numpy(), np.empty(len(elements) * target.itemsize, np.uint8)
    cast_elements(raw, stored, dtype, into)
    return torch.from_numpy(into).view(target)


@pytest.mark.parametrize(("stored", "dtype"), sorted(permutations(FLOATING, 2)))
def test_a_cast_gives_the_bytes_of_torch_and_one_nan(stored: str, dtype: str) -> None:
    elements = make_elements(getattr(torch, TORCH_NAMES[stored]))
    result, expected = cast(elements, stored, dtype), elements.to(getattr(torch, TORCH_NAMES[dtype]))
    width = expected.dtype.itemsize
    is_nan = expected.double().isnan()
    codes, expected_codes = (t.view(torch.uint8).reshape(-1, width) for t in (result, expected))
    assert torch.equal(codes[~is_nan], expected_codes[~is_nan])
    assert len(codes[is_nan].unique(dim=0)) == bool(is_nan.any())
    assert result[is_nan].double().isnan().all()
