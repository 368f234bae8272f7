"""The values of a checkpoint that is converted to NxD's format, with the tensors in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rankless.conversion.target import ConversionSource
from rankless.engine.io.source_reader import SourceReader
from rankless.engine.io.tensor_bytes import TensorBytes
from rankless.ondisk import values
from rankless.state.arrays import ArrayDecoder
from rankless.state.capture import STATE


def decode_values(source: ConversionSource) -> dict[str, Any]:
    """Decode the values of a source, and read the tensors in them."""
    infos = {name: info for (group, name), info in source.tensor_infos.items() if group == STATE}
    arrays = ArrayDecoder(infos)
    decoded = values.decode_value(dict(source.carried.shared), arrays, "the values")
    for name, tensor in arrays.tensors.items():
        _read_tensor(source, name, tensor)
    return dict(decoded)


def _read_tensor(source: ConversionSource, name: str, tensor: torch.Tensor) -> None:
    """Read a tensor of the values into memory."""
    if name in source.carried.arrays:
        tensor.copy_(source.carried.arrays[name])
        return
    buffer = np.empty(tensor.nbytes, np.uint8)
    extents = source.reader.find_extents(*source.selected.sources[STATE, name], 0, tensor.nbytes)
    with SourceReader([extent.file for extent in extents]) as reader:
        for index, extent in enumerate(extents):
            reader.read(index, extent.offset, buffer[extent.start : extent.stop].data)
    if tensor.nbytes:
        TensorBytes(tensor).write(0, buffer)
