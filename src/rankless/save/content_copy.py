"""Copies of the content that a caller passes with a step: later changes by the caller are not saved.

:meth:`rankless.Checkpointer.step` calls it on each rank, at each step, saved or not: so it must be cheap, and raise
nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

#: The most values, and the most bytes of tensors, arrays and texts, in content that is copied at each step.
_MAX_VALUES, _MAX_BYTES = 10_000, 2**20

_CONTAINERS = (dict, list, tuple, set, frozenset)


def copy_content(content: Any) -> Any:
    """Return content as it is now, without the graphs that tensors belong to. Nothing is checked.

    Content of more than 1 MiB, or of more than 10,000 values, is returned as it is. So is content that cannot be
    copied: its save raises the error. Copies of tensors stay on their device, so that nothing waits for it.
    """
    count = nbytes = 0
    copies: dict[int, Any] = {}
    try:
        for value in _iter_values(content):
            count += len(value) if isinstance(value, _CONTAINERS) else 0
            nbytes += _count_bytes(value)
            if count > _MAX_VALUES or nbytes > _MAX_BYTES:
                return content
            if isinstance(value, torch.Tensor):
                copies[id(value)] = value.detach().clone()
        return copy.deepcopy(content, copies)
    except Exception:  # noqa: BLE001 - objects of the caller may raise anything
        return content


def _iter_values(content: Any) -> Iterator[Any]:
    """Yield all values of a tree, containers before their items. It does not end if the tree is inside itself."""
    pending = [content]
    while pending:
        value = pending.pop()
        yield value
        if isinstance(value, dict):
            pending += [*value.keys(), *value.values()]
        elif isinstance(value, _CONTAINERS):
            pending += value


def _count_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.nbytes
    return len(value) if isinstance(value, str | bytes | bytearray) else 0
