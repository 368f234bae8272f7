"""A stored tensor to read parts from: ``from_pretrained`` of transformers takes these instead of tensors.

:meth:`~rankless.inference.weights_loader.WeightsLoader.slices` makes them on each rank. They must keep the interface of
safetensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rankless.ondisk.data_files import TensorInfo
from rankless.state.tensor_views import DTYPES


class StoredSlice:
    """A stored tensor that is read in parts, when they are asked for, as with safetensors' ``get_slice``.

    ``slice[index]`` returns a plain tensor in host memory, and reads just its elements. Any thread may ask.

    Attributes:
        dtype: The dtype of the tensor.
        shape: The shape of the tensor.
    """

    def __init__(self, info: TensorInfo, read: Callable[[Any], torch.Tensor]) -> None:
        """Make the slice of a tensor; ``read`` returns the elements of an index."""
        self._info, self._read = info, read
        self.dtype = DTYPES[info.dtype]
        self.shape = torch.Size(info.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._read(index)

    def get_shape(self) -> list[int]:
        """Return the shape of the tensor."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Return the dtype as safetensors calls it, such as ``"BF16"``."""
        return self._info.dtype

    def is_floating_point(self) -> bool:
        """Return whether the elements are floating point numbers."""
        return self.dtype.is_floating_point
