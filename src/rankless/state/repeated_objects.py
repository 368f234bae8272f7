"""Comparison of the saved values of one object that was passed under several names: it can have only one of them.

:mod:`rankless.state.restore` calls it on each rank while it matches, before anything has changed. It adds the pairs to
the inventory, which ranks exchange: their names must be the names in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from rankless.engine.plan.tensor_specs import STATE
from rankless.state.array_decoder import are_same_decoded


class Stored(NamedTuple):
    """A stored tensor. Its bytes are compared when they can be read."""

    group: str
    name: str


class SavedPlace(NamedTuple):
    """A saved value, its component, its name in messages, and the identity of the object that gets it here.

    A value of ``None`` is another form of the state of the object, which cannot be compared.
    """

    identity: object
    component: str
    subject: str
    value: Any


class Repetition(NamedTuple):
    """Two places of one object. ``tensors`` must be equal in pairs for both values to be; ``None``: others differ."""

    first: SavedPlace
    second: SavedPlace
    tensors: list[tuple[Stored, Stored]] | None

    def is_comparable(self) -> bool:
        """Return whether both values have one form."""
        return self.first.value is not None and self.second.value is not None


def find_repetitions(places: Sequence[SavedPlace], tensors: Mapping[str, torch.Tensor]) -> Iterator[Repetition]:
    """Yield each place of an object after its first place.

    ``tensors`` has the tensors in decoded values, by stored name.

    Tensors are recognized by their addresses: all decoded ones must be alive, each with memory of its own.
    """
    stored = {tensor.data_ptr(): Stored(STATE, name) for name, tensor in tensors.items() if tensor.numel()}
    first_places: dict[object, SavedPlace] = {}
    for place in places:
        first = first_places.setdefault(place.identity, place)
        if first is not place and not (first.value is None and place.value is None):
            yield Repetition(first, place, _pair_tensors(first.value, place.value, stored))


def _pair_tensors(first: Any, second: Any, stored: Mapping[int, Stored]) -> list[tuple[Stored, Stored]] | None:
    """Return the stored tensors that must be equal for two values to be the same; ``None`` if they differ anyway."""
    first, second = (_as_stored(value, stored) for value in (first, second))
    if isinstance(first, Stored) and isinstance(second, Stored):
        return [(first, second)]
    if type(first) is not type(second):
        return None
    if isinstance(first, Mapping):
        if first.keys() != second.keys():
            return None
        children = [(first[key], second[key]) for key in first]
    elif isinstance(first, list | tuple):
        if len(first) != len(second):
            return None
        children = list(zip(first, second, strict=True))
    else:
        return [] if _are_same_leaves(first, second) else None
    paired = [_pair_tensors(*child, stored) for child in children]
    return None if None in paired else [pair for pairs in paired for pair in pairs or ()]


def _as_stored(value: Any, stored: Mapping[int, Stored]) -> Any:
    """Return a tensor or array of a decoded value as the stored tensor that it will be read from, if there is one."""
    if isinstance(value, torch.Tensor):
        return stored.get(value.data_ptr(), value)
    return stored.get(value.__array_interface__["data"][0], value) if isinstance(value, np.ndarray) else value


def _are_same_leaves(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor | np.ndarray):
        is_alike = first.dtype == second.dtype and first.shape == second.shape
        return is_alike and _bytes_of_leaf(first) == _bytes_of_leaf(second)
    return are_same_decoded(first, second)


def _bytes_of_leaf(value: torch.Tensor | np.ndarray[Any, Any]) -> bytes:
    if isinstance(value, torch.Tensor):
        return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return value.tobytes()
