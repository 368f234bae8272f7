"""Tests the values of stored elements against torch: every element of the dtypes of one and two bytes."""

import numpy as np
import pytest
import torch

from rankless.inspection.bits_to_floats import as_array, as_values
from rankless.ondisk.dtypes import WIDTHS
from rankless.state.tensor_views import DTYPES

NARROW = sorted(name for name, width in WIDTHS.items() if width <= 2 and name != "BOOL")


def all_elements(dtype: str) -> np.ndarray:
    width = WIDTHS[dtype]
    return np.arange(2 ** (8 * width), dtype=f"u{width}")


@pytest.mark.parametrize("dtype", NARROW)
def test_every_element_has_the_value_that_torch_gives_it(dtype: str) -> None:
    bits = all_elements(dtype)
    expected = torch.from_numpy(bits.view(np.uint8)).view(DTYPES[dtype]).to(torch.float64).numpy()
    actual = as_values(bits, dtype)
    np.testing.assert_array_equal(actual, expected)
    is_number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(actual[is_number]), np.signbit(expected[is_number]))


@pytest.mark.parametrize("dtype", NARROW)
def test_an_array_has_these_values_too(dtype: str) -> None:
    bits = all_elements(dtype)
    array = as_array(bits.view(np.uint8), dtype)
    np.testing.assert_array_equal(array.astype(np.float64), as_values(bits, dtype))
    assert array.dtype == np.float32 or dtype not in {"BF16"} | {name for name in NARROW if name.startswith("F8")}
