"""The values of a checkpoint on their way into one of NxD, with the tensors in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from holdfast.conversion.target import Material
from holdfast.engine.local import LocalPart
from holdfast.engine.opened import Opened
from holdfast.layout import values
from holdfast.state.arrays import ArraysIn
from holdfast.state.capture import STATE


def decoded(material: Material) -> dict[str, Any]:
    """The values, with the tensors in them."""
    infos = {name: info for (group, name), info in material.infos.items() if group == STATE}
    arrays = ArraysIn(infos)
    found = values.decode(dict(material.carried.shared), arrays, "the values")
    for name, tensor in arrays.tensors.items():
        _fill(material, name, tensor)
    return dict(found)


def _fill(material: Material, name: str, tensor: torch.Tensor) -> None:
    if name in material.carried.arrays:
        tensor.copy_(material.carried.arrays[name])
        return
    into = np.empty(tensor.nbytes, np.uint8)
    extents = material.reader.extents(*material.chosen.sources[STATE, name], 0, tensor.nbytes)
    with Opened([extent.file for extent in extents]) as opened:
        for index, extent in enumerate(extents):
            opened.read(index, extent.offset, into[extent.start : extent.stop].data)
    if tensor.nbytes:
        LocalPart(tensor).write(0, into)
