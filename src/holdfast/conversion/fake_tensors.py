"""Trees with tensors that have no data: what torch lays out, before anything is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from holdfast.conversion.target import ConversionSource
from holdfast.conversion.tensor_filter import Key
from holdfast.engine.plan.spec import PER_RANK as RANKS
from holdfast.ondisk import values
from holdfast.ondisk.files import TensorInfo
from holdfast.state.arrays import ArrayDecoder
from holdfast.state.capture import STATE
from holdfast.state.tensors import DTYPES

#: Tensors by group and name.
Groups = Mapping[str, Mapping[str, torch.Tensor]]

#: Makes the tree of a file from tensors and values.
Shape = Callable[[Groups, Mapping[str, Any]], Any]


class FakeTensors(ArrayDecoder):
    """Makes tensors without data, each once."""

    def __init__(self, infos: Mapping[Key, TensorInfo]) -> None:
        super().__init__({name: info for (group, name), info in infos.items() if group == STATE})
        self._every, self._mode = infos, FakeTensorMode()
        self.made: dict[Key, torch.Tensor] = {}

    def tree(self, material: ConversionSource, shape: Shape) -> Any:
        """What ``shape`` makes of the tensors and values there are."""
        return shape(self._groups(material), values.decode_value(dict(material.carried.shared), self, "the values"))

    def _groups(self, material: ConversionSource) -> dict[str, dict[str, torch.Tensor]]:
        groups: dict[str, dict[str, torch.Tensor]] = {}
        for group, name in material.chosen.infos:
            if group not in {STATE, RANKS}:
                groups.setdefault(group, {})[name] = self.make((group, name))
        for group, names in material.chosen.tied.items():
            for alias, name in names.items():
                groups[group][alias] = groups[group][name]
        return groups

    def make(self, key: Key) -> torch.Tensor:
        """The tensor of a group and name."""
        if key not in self.made:
            info = self._every[key]
            with self._mode:
                self.made[key] = torch.empty(info.shape, dtype=DTYPES[info.dtype])
        return self.made[key]

    def decode(self, tag: str, payload: Any) -> Any:
        """See :class:`holdfast.ondisk.values.ArrayCodec`. Arrays become tensors, which torch loads without trust."""
        if tag not in {"$tensor", "$array"}:
            return super().decode(tag, payload)
        self._info(payload)
        return self.make((STATE, payload))
