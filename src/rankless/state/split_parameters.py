"""Optimizer states of split parameters: they are split in the same way, and stored under the same names.

:mod:`rankless.state.capture` asks it on each rank in the first vote of a save. The names are in files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from rankless.engine.plan.split_tensors import Splits, whole_splits
from rankless.errors import UnsupportedTensorError
from rankless.ondisk.validation import split_state_key, state_key
from rankless.state.model.model_view import ParamRef
from rankless.state.optimizer.optimizer_view import ParamGroup
from rankless.state.tensor_views import TensorView


def split_refs(groups: Sequence[ParamGroup]) -> dict[str, ParamRef]:
    """Return the parameters that are stored as several tensors, by name."""
    refs = (ref for group in groups for member in group.members for ref in member.refs)
    return {ref.name: ref for ref in refs if ref.splits}


def split_state(key: str, tensor: TensorView, refs: Mapping[str, ParamRef]) -> Splits:
    """Return the tensors that a state tensor is stored as, if its parameter is one of ``refs``.

    Raises ``UnsupportedTensorError`` if the state has neither a value for each element nor one for all.
    """
    name, state = split_state_key(key)
    ref = refs.get(name)
    if ref is None:
        return ()
    if tensor.shape == ref.tensor.shape:
        return tuple(replace(split, name=state_key(split.name, state)) for split in ref.splits)
    if all(size == 1 for size in tensor.shape):
        return whole_splits((state_key(name, state) for name in stored_names(ref)), tensor.shape)
    raise UnsupportedTensorError(
        f"optimizer state {key!r} has shape {list(tensor.shape)}, and its parameter, of shape "
        f"{list(ref.tensor.shape)}, is split by its state_dict hooks, which cannot be done with the state: pass "
        "state_dict_hooks=False to save both as the model has them"
    )


def split_group(group: Mapping[str, Any], refs: Mapping[str, ParamRef]) -> dict[str, Any]:
    """Return the stored values of a parameter group, with the names that its parameters are stored under."""
    names_of = {name: stored_names(refs[name]) if name in refs else [name] for name in group["params"]}
    return {
        **group,
        "params": [stored for name in group["params"] for stored in names_of[name]],
        "state": {stored: states for name, states in group["state"].items() for stored in names_of[name]},
    }


def stored_names(ref: ParamRef) -> list[str]:
    """Return the names that a parameter is stored under."""
    return list(dict.fromkeys(split.name for split in ref.splits))
