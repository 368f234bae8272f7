"""The values of stored elements, as floating-point numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rankless.state.tensors import DTYPES

#: Elements as unsigned integers of their width: the raw bits.
Bits = npt.NDArray[Any]


def as_values(bits: Bits, dtype: str) -> npt.NDArray[Any]:
    """Convert elements to float64 or complex128."""
    tensor = torch.from_numpy(bits.view(np.uint8)).view(DTYPES[dtype])
    values: npt.NDArray[Any] = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).numpy()
    return values
