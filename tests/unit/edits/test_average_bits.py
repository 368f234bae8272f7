"""The mean of two tensors is computed in float32. It equals the mean in float64 that torch rounds, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rankless.edits.formulas import AverageFormula, StoredFormula
from rankless.formats.edited_reader import StoredKey
from rankless.ondisk.data_files import TensorInfo
from rankless.storage.aligned_memory import Bytes

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}

COUNT = 300_000


def average(tensors: list[torch.Tensor], dtype: str) -> torch.Tensor:
    info = TensorInfo(dtype, (len(tensors[0]),))
    stored = [tensor.view(torch.uint8).numpy() for tensor in tensors]

    def read(key: StoredKey, start: int, into: Bytes) -> None:
        into[:] = stored[key.source][start : start + len(into)]

    formula = AverageFormula(info, tuple(StoredFormula(StoredKey(i, "model", "w"), info) for i in range(len(stored))))
    into = np.empty(stored[0].nbytes, np.uint8)
    formula.fill(0, into, read)
    return torch.from_numpy(into).view(DTYPES[dtype])


def mean_in_float64(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the oracle: torch's own sum, division and casts."""
    total = tensors[0].double()
    for tensor in tensors[1:]:
        total = total + tensor.double()
    return (total / len(tensors)).float().to(tensors[0].dtype)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    is_nan = expected.float().isnan()
    assert torch.equal(actual.float().isnan(), is_nan)
    assert torch.equal(actual[~is_nan].view(torch.uint8), expected[~is_nan].view(torch.uint8))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_bits(dtype: str, count: int) -> None:
    random = np.random.default_rng(count)
    tensors = [
        torch.from_numpy(np.frombuffer(random.bytes(COUNT * DTYPES[dtype].itemsize), np.uint8).copy()).view(
            DTYPES[dtype]
        )
        for _ in range(count)
    ]
    assert_same_bits(average(tensors, dtype), mean_in_float64(tensors))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [1, 30, 120])
def test_finite_numbers_of_very_different_size(dtype: str, spread: int) -> None:
    """No element is infinite here: so float32 is used for all, also for sums that need more bits than it has."""
    generator = torch.Generator().manual_seed(spread)
    tensors = []
    for _ in range(2):
        exponents = torch.randint(-spread, spread // 4 + 1, (COUNT,), generator=generator).double()
        numbers = torch.randn(COUNT, generator=generator, dtype=torch.float64) * torch.exp2(exponents)
        largest = torch.finfo(DTYPES[dtype]).max
        tensors.append(numbers.clamp(-largest, largest).to(DTYPES[dtype]))
    assert_same_bits(average(tensors, dtype), mean_in_float64(tensors))


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_a_sum_that_overflows_has_a_mean(dtype: str) -> None:
    largest = torch.full((5,), torch.finfo(DTYPES[dtype]).max, dtype=DTYPES[dtype])
    assert torch.equal(average([largest, largest], dtype), largest)


@pytest.mark.parametrize("count", [2, 3])
def test_the_mean_of_negative_zeros_is_one(count: int) -> None:
    zeros = torch.full((5,), -0.0)
    assert torch.equal(average([zeros] * count, "F32").view(torch.int32), zeros.view(torch.int32))
