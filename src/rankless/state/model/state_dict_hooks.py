"""Effects of a model's ``state_dict`` hooks on its tensors, found by running the hooks on tensors without data.

A hook may rename a tensor, or split it. Then each result consists of elements of one of the model's tensors in some
order, and their bytes are stored without a copy. Results that a hook computes or joins cannot be traced like this.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rankless.engine.plan.split_tensors import SplitLayout, split_tiles
from rankless.state.model.element_origins import OriginTracker, StridedElements, make_splits, whole_tensor
from rankless.state.model.model_view import is_extra


@dataclass(frozen=True)
class HookedStateDict:
    """The result of ``state_dict``: tensors of the model and other values by name.

    ``splits`` describe how hooks split tensors, by the model's name of the tensor. ``computed`` are the names of
    tensors that are neither of the model nor made of its elements.
    """

    values: dict[str, Any]
    splits: dict[str, tuple[SplitLayout, ...]] = field(default_factory=dict)
    computed: list[str] = field(default_factory=list)


def has_hooks(module: nn.Module) -> bool:
    """Return whether any submodule of a model has a hook on ``state_dict``."""
    return any(submodule._state_dict_hooks for submodule in module.modules())  # noqa: SLF001


def state_dict_names(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers of a model, by its own names of them."""
    return {
        f"{path}.{name}" if path else name: tensor
        for path, submodule in module.named_modules(remove_duplicate=False)
        for name, tensor in (*submodule._parameters.items(), *submodule._buffers.items())  # noqa: SLF001
        if tensor is not None and name not in submodule._non_persistent_buffers_set  # noqa: SLF001
    }


def hooked_state_dict(module: nn.Module) -> HookedStateDict:
    """Return a model's ``state_dict`` without a copy, with its hooks run on tensors without data if possible."""
    tensors = state_dict_names(module)
    if has_hooks(module):
        stand_ins = _StandIns(tensors)
        with suppress(Exception), torch.no_grad(), stand_ins.origins:  # a hook that needs data gets it below
            return stand_ins.to_result(module.state_dict(destination=stand_ins, keep_vars=True))
    with torch.no_grad():
        values = dict(module.state_dict(keep_vars=True))
    model_ids = {id(tensor) for tensor in itertools.chain(module.parameters(), module.buffers())}
    return HookedStateDict(
        values, computed=[name for name, value in values.items() if _is_unknown(name, value, model_ids)]
    )


def _is_unknown(name: str, value: object, model_ids: set[int]) -> bool:
    return isinstance(value, torch.Tensor) and id(value) not in model_ids and not is_extra(name)


class _StandIns(OrderedDict[str, Any]):
    """A state dict to be filled, in which tensors without data stand for those of the model."""

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
