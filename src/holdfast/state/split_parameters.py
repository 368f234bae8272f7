"""Optimizer states of parameters that are stored in parts: they are stored in parts alike, under the same names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from holdfast.engine.plan.split_tensors import Splits, is_whole
from holdfast.errors import UnsupportedTensorError
from holdfast.ondisk.validation import split_state_key, state_key
from holdfast.state.model.view import ParamRef
from holdfast.state.optimizer.view import ParamGroup
from holdfast.state.tensors import TensorView


def split_refs(groups: Sequence[ParamGroup]) -> dict[str, ParamRef]:
    """The parameters that are stored in parts, by name."""
    handles = (handle for group in groups for member in group.members for handle in member.handles)
    return {handle.name: handle for handle in handles if handle.splits}


def split_state(key: str, tensor: TensorView, handles: Mapping[str, ParamRef]) -> Splits:
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
        return is_whole((state_key(name, state) for name in stored_names(handle)), tensor.shape)
    raise UnsupportedTensorError(
        f"optimizer state {key!r} has shape {list(tensor.shape)}, and its parameter, of shape "
        f"{list(handle.like.shape)}, is stored in parts as its state_dict hooks say, which the state cannot be: pass "
        "state_dict_hooks=False to save both as the model has them"
    )


def split_group(group: Mapping[str, Any], handles: Mapping[str, ParamRef]) -> dict[str, Any]:
    """What a checkpoint says of a parameter group, with the names that its parameters are stored under."""
    known = {name: stored_names(handles[name]) if name in handles else [name] for name in group["params"]}
    return {
        **group,
        "params": [stored for name in group["params"] for stored in known[name]],
        "state": {stored: states for name, states in group["state"].items() for stored in known[name]},
    }


def stored_names(handle: ParamRef) -> list[str]:
    """The names that a parameter is stored under."""
    return list(dict.fromkeys(split.name for split in handle.splits))
