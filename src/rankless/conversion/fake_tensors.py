"""Trees of tensors without data. torch lays out a file from them before any tensor is read.

Conversion targets make them on every rank, and saves of one component on rank 0. Equal sources must give equal trees on
all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rankless.conversion.target import ConversionSource
from rankless.conversion.tensor_filter import Key
from rankless.engine.plan.tensor_specs import PER_RANK as RANKS
from rankless.engine.plan.tensor_specs import STATE
from rankless.ondisk import values
from rankless.ondisk.data_files import TensorInfo
from rankless.state.array_decoder import ArrayDecoder
from rankless.state.tensor_views import DTYPES

#: Tensors by group and name.
Groups = Mapping[str, Mapping[str, torch.Tensor]]

#: Makes the tree of a file from tensors and values.
Shape = Callable[[Groups, Mapping[str, Any]], Any]


class FakeTensors(ArrayDecoder):
    """A factory of tensors without data, which creates each tensor once."""

    def __init__(self, infos: Mapping[Key, TensorInfo]) -> None:
        super().__init__({name: info for (group, name), info in infos.items() if group == STATE})
        self._infos_by_key, self._mode = infos, FakeTensorMode()
        self.tensors_by_key: dict[Key, torch.Tensor] = {}

    def build_tree(self, source: ConversionSource, shape: Shape) -> Any:
        """Return the tree that ``shape`` builds from the tensors and values of a source."""
        return shape(self._build_groups(source), values.decode_value(dict(source.carried.shared), self, "the values"))

    def _build_groups(self, source: ConversionSource) -> dict[str, dict[str, torch.Tensor]]:
        groups: dict[str, dict[str, torch.Tensor]] = {}
        for group, name in source.selected.infos:
            if group not in {STATE, RANKS}:
                groups.setdefault(group, {})[name] = self.make_tensor((group, name))
        for group, names in source.selected.tied.items():
            for alias, name in names.items():
                groups[group][alias] = groups[group][name]
        return groups

    def make_tensor(self, key: Key) -> torch.Tensor:
        """Return the tensor of a group and name."""
        if key not in self.tensors_by_key:
            info = self._infos_by_key[key]
            with self._mode:
                self.tensors_by_key[key] = torch.empty(info.shape, dtype=DTYPES[info.dtype])
        return self.tensors_by_key[key]

    def decode(self, tag: str, payload: Any) -> Any:
        """See :class:`rankless.ondisk.values.ArrayCodec`. Arrays become tensors: ``weights_only`` allows these."""
        if tag not in {"$tensor", "$array"}:
            value = super().decode(tag, payload)
            return value.contiguous() if isinstance(value, torch.Tensor) else value  # writers store rows
        self._find_info(payload)
        return self.make_tensor((STATE, payload))
