"""A state dict that ``state_dict`` hooks fill, with tensors without data that stand for the model's tensors.

:mod:`rankless.state.model.state_dict_hooks` fills one on each rank when a model with hooks is viewed. The tensors that
it returns must be the model's own, so that nothing is copied.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rankless.engine.plan.split_tensors import SplitLayout, split_tiles
from rankless.state.model.element_origins import OriginTracker, StridedElements, make_splits, whole_tensor
from rankless.state.model.model_view import is_extra
from rankless.state.model.state_dict_hooks import HookedStateDict


class StandIns(OrderedDict[str, Any]):
    """A state dict to be filled, where tensors without data stand for the model's tensors."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._metadata: OrderedDict[str, Any] = OrderedDict()
        self.origins = OriginTracker()
        self._names = {id(tensor): name for name, tensor in reversed(list(tensors.items()))}
        self._tensors = tensors
        self._stand_ins: dict[str, torch.Tensor] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        name = self._names.get(id(value)) if isinstance(value, torch.Tensor) else None
        super().__setitem__(key, value if name is None else self._get_stand_in(name))

    def _get_stand_in(self, name: str) -> torch.Tensor:
        if name not in self._stand_ins:
            tensor = self._tensors[name]
            stand_in = self._stand_ins[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            self.origins.record(stand_in, [whole_tensor(name, stand_in)])
        return self._stand_ins[name]

    def to_result(self, state: Mapping[str, Any]) -> HookedStateDict:
        """Return the result of ``state_dict``, with the model's tensors in place of their stand-ins."""
        result = HookedStateDict({})
        splits_of: dict[str, list[SplitLayout]] = {}
        for name, value in state.items():
            origins = self.origins.find_origins(value) if isinstance(value, torch.Tensor) else None
            if not isinstance(value, torch.Tensor) or is_extra(name):
                result.values[name] = value
            elif origins is None or len({elements.name for elements in origins}) > 1:
                result.computed.append(name)
            elif self._is_unchanged(value, origins):
                result.values[name] = self._tensors[origins[0].name]
            else:
                for origin, split in make_splits(name, tuple(value.shape), origins):
                    splits_of.setdefault(origin, []).append(split)
        for name, splits in splits_of.items():
            # A part under the tensor's own name would be taken for the whole tensor.
            is_stored_whole = name in state or any(value is self._tensors[name] for value in result.values.values())
            if is_stored_whole or not split_tiles(self._stand_ins[name].numel(), tuple(splits)):
                result.computed.extend(dict.fromkeys(split.name for split in splits))
            else:
                result.values[name], result.splits[name] = self._tensors[name], tuple(splits)
        return result

    def _is_unchanged(self, value: torch.Tensor, origins: Sequence[StridedElements]) -> bool:
        """Return whether the value is a whole tensor of the model, perhaps detached or copied."""
        stand_in = self._stand_ins[origins[0].name]
        return value.shape == stand_in.shape and list(origins) == [whole_tensor(origins[0].name, stand_in)]
