"""Everything that a run holds, gathered and flat, and what differs between two of these: the oracle of the campaign.

It reads torch's objects alone, and nothing of rankless.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from campaigns.optimizers.training import Run

#: Tensors and plain values by path.
Snapshot = dict[str, Any]


def take_snapshot(run: Run) -> Snapshot:
    """Return the parameters, the live states and the state dict of a run, whole. All ranks call it."""
    model, optimizer = run
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    gathered: dict[int, torch.Tensor] = {}
    live = {str(names.get(id(key), key)): states for key, states in getattr(optimizer, "state", {}).items()}
    parts = {"model": dict(model.named_parameters()), "state": live, "state_dict": optimizer.state_dict()}
    return dict(_flatten(parts, "", gathered))


def _flatten(tree: Any, path: str, gathered: dict[int, torch.Tensor]) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, DTensor) and is_traceable_wrapper_subclass(tree.to_local()):
        yield from _gather_wrapper(tree.to_local(), path)
    elif isinstance(tree, torch.Tensor):
        if id(tree) not in gathered:
            gathered[id(tree)] = _gather(tree.detach())
        yield from _flatten_wrapper(gathered[id(tree)], path)
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _flatten(value, f"{path}/{key}", gathered)
    elif isinstance(tree, list | tuple | deque):
        yield path, type(tree).__name__
        for number, value in enumerate(tree):
            yield from _flatten(value, f"{path}/{number}", gathered)
    elif isinstance(tree, Enum):
        yield path, str(tree)
    elif hasattr(tree, "__dict__") and not callable(tree):
        yield path, type(tree).__qualname__
        yield from _flatten(vars(tree), path, gathered)
    else:
        yield path, tree if isinstance(tree, int | float | str | None) else repr(tree)


def _gather(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _gather_wrapper(local: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the inner tensors of a sharded wrapper, joined by rows. torchao itself gathers those of 8 bits only."""
    for name in local.__tensor_flatten__()[0]:
        inner = getattr(local, name)
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, inner.view(torch.uint8))  # torch cannot pickle float8
        yield f"{path}.{name}", (parts[0] if name == "qmap" else torch.cat(parts)).view(inner.dtype)


def _flatten_wrapper(tensor: torch.Tensor, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the plain tensors that a tensor consists of."""
    if not is_traceable_wrapper_subclass(tensor):
        yield path, tensor.clone()
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from _flatten_wrapper(_gather(getattr(tensor, name)), f"{path}.{name}")


def find_differences(expected: Snapshot, actual: Snapshot) -> list[str]:
    """Return the paths of what differs in type, dtype, shape or a bit, or is only in one of two snapshots."""
    return [path for path in expected | actual if not _is_same(expected.get(path, _NONE), actual.get(path, _NONE))]


_NONE = object()


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(_bytes_of(a), _bytes_of(b))
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    return type(a) is type(b) and bool(a == b)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
