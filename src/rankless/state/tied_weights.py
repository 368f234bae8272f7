"""Tied weights: the several names of one tensor of a model.

:mod:`rankless.state.model.model_traversal` asks it on each rank. Ranks with the same model must keep the same name of a
tensor: it is in files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rankless.state.tensor_views import local_tensor


def find_tied(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """Yield the names, in order, of each tensor that has several names: tied weights.

    One parameter under two names is tied and, among tensors of a state dict, views of the same memory with equal layout
    are. For example, a language model with tied embeddings gives ``["embed.weight", "lm_head.weight"]``.
    """
    first_names: dict[int, str] = {}
    by_address: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        address = id(tensor) if type(tensor) is nn.Parameter else _memory_address(tensor)
        first_name = first_names.setdefault(address, name)
        if first_name is not name:
            by_address.setdefault(address, [first_name]).append(name)
    for names in by_address.values():
        same: dict[object, list[str]] = {}
        for name in names:
            same.setdefault(_tensor_identity(tensors[name]), []).append(name)
        yield from (group for group in same.values() if len(group) > 1)


def _memory_address(tensor: torch.Tensor) -> int:
    local = local_tensor(tensor)
    has_memory = local.layout == torch.strided and not local.is_meta
    return (local.data_ptr() if has_memory else 0) or id(tensor)


def _tensor_identity(tensor: torch.Tensor) -> object:
    local = local_tensor(tensor)
    if isinstance(tensor, nn.Parameter) or _memory_address(tensor) == id(tensor):
        return id(tensor)
    # A lazy conjugate or negation is a bit on a view of the same memory. Its values differ, so it is another tensor.
    view_key = local.dtype, tuple(tensor.shape), local.stride(), local.is_conj(), local.is_neg()
    layout = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
    return local.device, local.data_ptr(), *view_key, layout
