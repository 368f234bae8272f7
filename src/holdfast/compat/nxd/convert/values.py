"""The values of a checkpoint on their way into one of NxD, with the tensors in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from holdfast.conversion.target import ConversionSource
from holdfast.engine.io.source_reader import SourceReader
from holdfast.engine.io.tensor_bytes import TensorBytes
from holdfast.ondisk import values
from holdfast.state.arrays import ArrayDecoder
from holdfast.state.capture import STATE


def decode_values(material: ConversionSource) -> dict[str, Any]:
    """The values, with the tensors in them."""
    infos = {name: info for (group, name), info in material.infos.items() if group == STATE}
    arrays = ArrayDecoder(infos)
    found = values.decode_value(dict(material.carried.shared), arrays, "the values")
    for name, tensor in arrays.tensors.items():
        _fill(material, name, tensor)
    return dict(found)


def _fill(material: ConversionSource, name: str, tensor: torch.Tensor) -> None:
    if name in material.carried.arrays:
        tensor.copy_(material.carried.arrays[name])
        return
    into = np.empty(tensor.nbytes, np.uint8)
    extents = material.reader.extents(*material.chosen.sources[STATE, name], 0, tensor.nbytes)
    with SourceReader([extent.file for extent in extents]) as opened:
        for index, extent in enumerate(extents):
            opened.read(index, extent.offset, into[extent.start : extent.stop].data)
    if tensor.nbytes:
        TensorBytes(tensor).write(0, into)
