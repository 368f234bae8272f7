"""Optimizer states of parameters that are stored in parts: they are stored in parts alike, under the same names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from holdfast.engine.splits import Splits, whole
from holdfast.errors import UnsupportedTensorError
from holdfast.layout.names import split_state_key, state_key
from holdfast.state.named import Handle
from holdfast.state.optimizer import Group
from holdfast.state.tensors import Described


def split_handles(groups: Sequence[Group]) -> dict[str, Handle]:
    """The parameters that are stored in parts, by name."""
    handles = (handle for group in groups for member in group.members for handle in member.handles)
    return {handle.name: handle for handle in handles if handle.splits}


def split_state(key: str, tensor: Described, handles: Mapping[str, Handle]) -> Splits:
    """What a state tensor is stored as, where its parameter is one of ``handles``.

    Raises ``UnsupportedTensorError`` for a state that has neither a value for each element nor one for all.
    """
    name, state = split_state_key(key)
    handle = handles.get(name)
    if handle is None:
        return ()
    if tensor.shape == handle.like.shape:
        return tuple(replace(split, name=state_key(split.name, state)) for split in handle.splits)
    if all(size == 1 for size in tensor.shape):
        return whole((state_key(name, state) for name in stored_names(handle)), tensor.shape)
    raise UnsupportedTensorError(
        f"optimizer state {key!r} has shape {list(tensor.shape)}, and its parameter, of shape "
        f"{list(handle.like.shape)}, is stored in parts as its state_dict hooks say, which the state cannot be: pass "
        "state_dict_hooks=False to save both as the model has them"
    )


def split_group(group: Mapping[str, Any], handles: Mapping[str, Handle]) -> dict[str, Any]:
    """What a checkpoint says of a parameter group, with the names that its parameters are stored under."""
    known = {name: stored_names(handles[name]) if name in handles else [name] for name in group["params"]}
    return {
        **group,
        "params": [stored for name in group["params"] for stored in known[name]],
        "state": {stored: states for name, states in group["state"].items() for stored in known[name]},
    }


def stored_names(handle: Handle) -> list[str]:
    """The names that a parameter is stored under."""
    return list(dict.fromkeys(split.name for split in handle.splits))
