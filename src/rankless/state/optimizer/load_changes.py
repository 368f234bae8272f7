"""Changes by the own code of an optimizer to states and settings that have their loaded values already.

:mod:`rankless.state.optimizer.own_state` asks it on each rank when a load puts values in place.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from rankless.state.optimizer.object_states import COLLECTIONS, map_elements
from rankless.state.tensor_views import local_tensor


class _SeenTensor(NamedTuple):
    """A tensor, and how often torch had changed it, and its shard, when it was seen."""

    tensor: torch.Tensor
    versions: tuple[int, int]


def remember(tree: Any) -> Any:
    """Return a copy of a tree's collections, with its tensors as they are now, for :func:`is_unchanged`."""
    if isinstance(tree, torch.Tensor):
        return _SeenTensor(tree, _versions_of(tree))
    if isinstance(tree, np.ndarray):
        return tree.copy()
    if type(tree) is OrderedDict:
        return OrderedDict((key, remember(value)) for key, value in tree.items())
    return map_elements(tree, remember)


def is_unchanged(seen: Any, tree: Any) -> bool:
    """Return whether a tree has the values that :func:`remember` saw in it."""
    if isinstance(seen, _SeenTensor):
        return seen.versions == _versions_of(seen.tensor) and (
            tree is seen.tensor or (is_cast_of(tree, seen.tensor) and tree.dtype == seen.tensor.dtype)
        )
    if type(seen) is not type(tree):
        return False
    if type(seen) is OrderedDict and [*seen] != [*tree]:
        return False
    if type(seen) in {dict, OrderedDict}:
        return bool(seen.keys() == tree.keys()) and all(is_unchanged(seen[key], tree[key]) for key in seen)
    if type(seen) in COLLECTIONS:
        has_limit = getattr(seen, "maxlen", None) == getattr(tree, "maxlen", None)
        return has_limit and len(seen) == len(tree) and all(map(is_unchanged, seen, tree))
    return _is_same(seen, tree)


def _is_same(seen: Any, value: Any) -> bool:
    """Return whether two values of one type that are no collections are the same, bit for bit if they are floats."""
    if isinstance(seen, np.ndarray | np.generic):
        return seen.dtype == value.dtype and seen.shape == value.shape and bool(seen.tobytes() == value.tobytes())
    if isinstance(seen, float):
        return struct.pack("<d", seen) == struct.pack("<d", value)
    try:
        return bool(seen == value)
    except Exception:  # noqa: BLE001 - who cannot compare two values has changed them, as far as is known
        return False


def has_all(seen: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Return whether states or settings have all values that were seen; there may be more."""
    return all(name in values and is_unchanged(value, values[name]) for name, value in seen.items())


def is_cast_of(loaded: Any, value: Any) -> bool:
    """Return whether a loaded tree is the same as ``value``, but for dtypes that torch has cast its tensors to."""
    if type(loaded) is not type(value):
        return False
    if isinstance(value, torch.Tensor):
        a, b = local_tensor(loaded), local_tensor(value)
        return a.shape == b.shape and torch.allclose(a, b.to(a.dtype).to(a.device), rtol=0, atol=0, equal_nan=True)
    if type(value) in {dict, OrderedDict}:
        return bool(loaded.keys() == value.keys()) and all(is_cast_of(loaded[key], value[key]) for key in value)
    if type(value) in COLLECTIONS:
        return len(loaded) == len(value) and all(map(is_cast_of, loaded, value))
    return is_unchanged(value, loaded)


def _versions_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return how often torch changed a tensor and its shard; zeros if it does not count.

    An operation on a DTensor counts for the DTensor alone, and one on its shard for the shard.
    """
    if tensor.is_inference():
        return 0, 0
    return tensor._version, local_tensor(tensor)._version  # noqa: SLF001
