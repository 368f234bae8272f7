"""Tensors like a parameter inside of collections that are its states, such as a queue of its gradients.

They are stored as states of their own, so that they are divided like the parameter in any layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rankless.state.optimizer.object_states import COLLECTIONS, map_elements

_PART = "rankless.part"


def split_states(states: Mapping[str, Any], parameter: Any) -> Mapping[str, Any]:
    """Return states with the tensors in collections that are sharded, or have the parameter's shape, beside them.

    A table with the name of such a state takes the tensor's place.
    """
    if not any(type(value) in COLLECTIONS for value in states.values()):
        return states
    parts: dict[str, torch.Tensor] = {}
    kept = {name: _split(value, str(name), parameter, parts) for name, value in states.items()}
    return {**kept, **parts} if parts.keys().isdisjoint(kept) else states


def _split(value: Any, name: str, parameter: Any, parts: dict[str, torch.Tensor]) -> Any:
    def replace(element: Any) -> Any:
        if not isinstance(element, torch.Tensor):
            return _split(element, name, parameter, parts)
        is_like = isinstance(parameter, torch.Tensor) and element.ndim > 0 and element.shape == parameter.shape
        if not is_like and not isinstance(element, DTensor):
            return element
        place = f"{name}.{sum(part.startswith(f'{name}.') for part in parts)}"
        parts[place] = element
        return {_PART: place}

    return map_elements(value, replace)


def join_states(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states that :func:`split_states` split."""
    used: set[str] = set()

    def replace(value: Any) -> Any:
        if type(value) is not dict or value.keys() != {_PART} or value[_PART] not in states:
            return map_elements(value, replace)
        used.add(value[_PART])
        return states[value[_PART]]

    joined = {name: replace(value) for name, value in states.items()}
    return {name: value for name, value in joined.items() if name not in used}
