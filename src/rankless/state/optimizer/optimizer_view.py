"""Views of optimizers: states by parameter name, read at their own dtypes, without a step and without a cast.

``torch.optim.Optimizer.load_state_dict`` casts float32 moments of bfloat16 parameters down, and torch's
``get_optimizer_state_dict`` steps an optimizer that never stepped; neither is used.

:mod:`rankless.state.capture` views optimizers on each rank in the first vote of a save, :mod:`rankless.state.restore`
while it matches. The form of :meth:`ParamGroup.to_values` is in ``state.json``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import msgspec
import torch
from torch.distributed.tensor import DTensor

from rankless.errors import StateError, UnsupportedTensorError, UnsupportedValueError
from rankless.ondisk.validation import check_utf8, state_key
from rankless.state.declared_boxes import is_checkpointable
from rankless.state.model.flat_shards import flat_elements
from rankless.state.model.model_view import ModelView, ParamRef
from rankless.state.optimizer.adapters import (
    Key,
    OptimizerAdapter,
    StateDictOptimizer,
    TorchOptimizer,
    ZeroOptimizer,
    adapt_optimizer,
)
from rankless.state.optimizer.object_states import COLLECTIONS, describe_objects, split_states
from rankless.state.optimizer.own_state import DIVIDED, own_entry, warn_left_out
from rankless.state.optimizer.state_strides import describe_order
from rankless.state.optimizer.storable_states import check_states
from rankless.state.tensor_subclasses import WrapperView, is_wrapper, iter_inner, view_outside, view_wrapper
from rankless.state.tensor_views import NAMES, TensorView, view_boxes, view_of


class GroupMember(msgspec.Struct, frozen=True):
    """An entry of a parameter group: the optimizer's key for it, and references to the parameters behind it."""

    key: Key
    refs: tuple[ParamRef, ...]


class ParamGroup(msgspec.Struct, frozen=True):
    """A parameter group: ``number`` is its index in its optimizer, ``settings`` are live."""

    adapter: OptimizerAdapter
    number: int
    settings: dict[str, Any]
    members: list[GroupMember]

    def param_names(self) -> list[str]:
        """Return the names of its parameters."""
        return [ref.name for member in self.members for ref in member.refs]

    def to_values(self) -> dict[str, Any]:
        """Return the group as a checkpoint stores it, without states."""
        settings = {
            name: value.value if isinstance(value, Enum) else value
            for name, value in self.settings.items()
            if name not in {"params", "param_names"}
        }
        if not all(type(name) is str for name in settings):
            unnamed = next(name for name in settings if type(name) is not str)
            raise UnsupportedValueError(
                f"group {self.number} of the optimizer ({self.adapter.class_name or 'a state dict'}) has the setting "
                f"{unnamed!r}: settings are stored by name, so that this key must be text"
            )
        return {
            "class": self.adapter.class_name,
            "number": self.number,
            "params": self.param_names(),
            "ordered": True,
            "settings": settings,
        }


def view_groups(parts: Sequence[object], refs: Mapping[int, tuple[ParamRef, ...]] | None) -> list[ParamGroup]:
    """Return the parameter groups of the parts of an optimizer.

    Parameters are named by the model's ``refs``, else by the names that torch keeps in the groups, else by position.
    Raises ``StateError`` if the model does not have a parameter, or if two have one name.
    """
    groups = []
    for part in parts:
        adapter = adapt_optimizer(part)
        position = 0
        for number, settings in enumerate(adapter.param_groups):
            members = list(_iterate_members(settings, refs, number, position))
            groups.append(ParamGroup(adapter, number, settings, members))
            position += len(members)
    names = parameter_names(groups)
    if len(names) != len(set(names)):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise StateError(
            f"the optimizer, or two parts of it, have the parameter {duplicate!r} twice; pass the model, too"
        )
    return groups


def parameter_names(groups: Sequence[ParamGroup]) -> list[str]:
    """Return the names of the parameters of some groups."""
    return [name for group in groups for name in group.param_names()]


def refs_for(slot: str, models: Mapping[str, ModelView]) -> dict[int, tuple[ParamRef, ...]] | None:
    """Return the parameter references for the optimizer in ``slot``.

    If there are several models, references to others than the optimizer's own are prefixed by the model's name.
    """
    if not models:
        return None
    own_slot = "model" + slot.removeprefix("optimizer")
    merged: dict[int, tuple[ParamRef, ...]] = {}
    for name, view in sorted(models.items(), key=lambda item: item[0] != own_slot):
        prefix = "" if name in {own_slot, "model"} else name.removeprefix("model/") + "/"
        for identity, refs in view.refs.items():
            merged.setdefault(identity, tuple(ref.with_prefix(prefix) for ref in refs) if prefix else refs)
    return merged


def _iterate_members(
    settings: Mapping[str, Any], refs: Mapping[int, tuple[ParamRef, ...]] | None, number: int, position: int
) -> Iterator[GroupMember]:
    for i, entry in enumerate(settings["params"]):
        if isinstance(entry, torch.Tensor) and refs is not None:
            yield GroupMember(entry, _find_refs(entry, refs, f"parameter {i} of the optimizer's group {number}"))
        else:
            name = _name_member(entry, settings, i, f"parameter {i} of the optimizer's group {number}")
            name = str(position + i) if name is None else name
            tensor = view_outside(entry, f"parameter {name!r}") if isinstance(entry, torch.Tensor) else _UNKNOWN
            yield GroupMember(entry, (ParamRef(name, tensor),))


def _name_member(entry: Key, settings: Mapping[str, Any], i: int, subject: str) -> str | None:
    """Return the name of a parameter without a model, its own in a state dict or that in its group; ``None`` if none.

    Raises ``InvalidArgumentError`` if it is no text, or if the group has names of others only.
    """
    names: Any = settings.get("param_names")
    if not isinstance(entry, str) and not names:
        return None
    try:
        name = entry if isinstance(entry, str) else names[i]
    except (TypeError, LookupError):
        name = None
    return check_utf8(name, f"the name of {subject}, from its state dict or from param_names,")


#: A parameter in a state dict. Only its key is known.
_UNKNOWN = TensorView("", (), None, torch.empty(0))


def _find_refs(parameter: torch.Tensor, refs: Mapping[int, tuple[ParamRef, ...]], subject: str) -> tuple[ParamRef, ...]:
    param_refs = refs.get(id(parameter))
    if param_refs is None:
        raise StateError(
            f"{subject}, of shape {list(parameter.shape)}, is not a parameter of the model; create the optimizer after "
            "the model is wrapped, and pass the model that it trains, not its state dict; if a hook leaves it out of "
            "the model's state_dict(), pass state_dict_hooks=False to save all parameters"
        )
    return param_refs


def optimizer_tensors(groups: Sequence[ParamGroup]) -> Iterator[tuple[str, TensorView]]:
    """Yield the state tensors, live, by :func:`state_key`. Parameters without state have none."""
    for member, states in _owned_states(groups):
        tensors = {str(state): value for state, value in states.items() if isinstance(value, torch.Tensor)}
        for ref in member.refs:
            for state, value in tensors.items():
                if not is_wrapper(value):
                    yield state_key(ref.name, state), place_states(ref, state, value)
                    continue
                for name, inner in place_wrapper(ref, state, value).inner.items():
                    yield state_key(ref.name, _inner_state(ref, state, name, states)), inner


def optimizer_values(groups: Sequence[ParamGroup]) -> list[dict[str, Any]]:
    """Return everything but the state tensors: each group's class, parameters and settings, and other states.

    Of states of wrapper subclasses these are the descriptions; of tensors with an order of dimensions in memory that is
    not their parameter's, the order.
    """
    plain: dict[str, dict[str, Any]] = {}
    live = {id(member): group.adapter for group in groups for member in group.members}
    for member, states in _owned_states(groups):
        adapter = live[id(member)]
        for state, value in states.items():
            for ref in member.refs:
                if not isinstance(value, torch.Tensor):
                    if isinstance(adapter, TorchOptimizer) and not ref.tensor.is_divided():
                        value = describe_objects(value, adapter.optimizer)  # noqa: PLW2901
                    plain.setdefault(ref.name, {})[str(state)] = value
                elif (order := describe_order(member.key, value)) and ref.flat is None:
                    plain.setdefault(ref.name, {})[str(state)] = order
                elif is_wrapper(value):
                    plain.setdefault(ref.name, {})[str(state)] = place_wrapper(ref, str(state), value).description
    return [
        {**group.to_values(), "state": {name: plain[name] for name in group.param_names() if name in plain}}
        for group in groups
    ]


def owned_names(groups: Sequence[ParamGroup]) -> list[str]:
    """Return the names of the parameters that have their states on this rank, if they have some."""
    return [
        ref.name
        for group in groups
        for member in group.members
        if group.adapter.owns_state(member.key)
        for ref in member.refs
        if ref.flat is None or ref.flat.parameter.numel()  # FSDP1: no elements here, so no gradient
    ]


def own_entries(groups: Sequence[ParamGroup]) -> list[dict[str, Any]]:
    """Return the values that some groups' optimizers keep besides states and settings, each with parameter names."""
    entries = (
        own_entry(adapter.optimizer, names) if type(adapter) is TorchOptimizer else _other_entry(adapter, names)
        for adapter, names in iterate_own(groups)
    )
    return [entry for entry in entries if entry is not None]


def _other_entry(adapter: TorchOptimizer | StateDictOptimizer, names: list[str]) -> dict[str, Any] | None:
    """Return the values that a ``ZeroRedundancyOptimizer`` or a state dict keeps besides states and settings."""
    if isinstance(adapter, StateDictOptimizer):
        from rankless.state.optimizer.own_of_state_dicts import (  # noqa: PLC0415 - few optimizers are state dicts
            entry_of_state_dict,
        )

        return entry_of_state_dict(adapter.state_dict, names)
    entry = own_entry(adapter.optimizer, names)
    if not isinstance(adapter, ZeroOptimizer):
        return entry
    if unread := adapter.explain_unread():
        entry = {"params": names, **(entry or {}), "differed": warn_left_out(adapter.outer, unread)}
    return entry and {**entry, **({DIVIDED: True} if adapter.outer.world_size > 1 else {})}


def iterate_own(groups: Sequence[ParamGroup]) -> Iterator[tuple[TorchOptimizer | StateDictOptimizer, list[str]]]:
    """Yield each optimizer, which may keep more than states and settings, with the names of the parameters it steps."""
    for adapter in {id(group.adapter): group.adapter for group in groups}.values():
        if isinstance(adapter, TorchOptimizer | StateDictOptimizer):
            members = [member for group in groups if group.adapter is adapter for member in group.members]
            yield adapter, [ref.name for member in members if adapter.owns_state(member.key) for ref in member.refs]


def _owned_states(groups: Sequence[ParamGroup]) -> Iterator[tuple[GroupMember, Mapping[str, Any]]]:
    for group in groups:
        for member in group.members:
            if group.adapter.owns_state(member.key):
                states = group.adapter.get_states(member.key)
                check_states(states, member.key, member.refs[0].name if member.refs else "")
                has_collection = any(type(value) in COLLECTIONS for value in states.values())
                yield member, split_states(states, member.key) if has_collection else states


def _inner_state(ref: ParamRef, state: str, inner: str, states: Mapping[str, Any]) -> str:
    """Return the stored name of an inner tensor of a state."""
    name = f"{state}.{inner}"
    if name in states:
        raise StateError(
            f"{ref.name!r} has the optimizer state {name!r}, which is also the name of a part of {state!r}"
        )
    return name


def place_wrapper(ref: ParamRef, state: str, value: torch.Tensor) -> WrapperView:
    """Return a state of a wrapper subclass as a checkpoint sees it.

    Raises ``UnsupportedTensorError`` if its layout is unknown, or if its inner tensors cannot be divided like it.
    """
    subject = f"optimizer state {state_key(ref.name, state)!r}"
    is_whole = not isinstance(value, DTensor) and not any(isinstance(inner, DTensor) for _, inner in iter_inner(value))
    if ref.flat is not None or (is_whole and ref.tensor.is_divided()):
        raise UnsupportedTensorError(
            f"{subject} is a {type(value).__qualname__}, and its parameter is sharded: it is unknown which part of the "
            "state it holds; shard with FSDP2's fully_shard(), whose states are DTensors"
        )
    wrapper = view_wrapper(value, subject)
    # The dtype is an appearance, and may depend on the layout; inner tensors have dtypes of their own.
    wrapper.description.pop("dtype")
    return wrapper


def place_states(ref: ParamRef, state: str, value: torch.Tensor) -> TensorView:
    """Return a state tensor as a checkpoint sees it. Raises ``UnsupportedTensorError`` if its layout is unknown."""
    if ref.flat is not None:
        local = flat_elements(ref.flat, value)
        if local is not None:
            return TensorView(NAMES[local.dtype], ref.tensor.shape, ref.tensor.layout, local)
    subject = f"optimizer state {state_key(ref.name, state)!r}"
    declared = ref.tensor.declared
    is_unmarked = not isinstance(value, DTensor) and not is_checkpointable(value)
    if declared is not None and is_unmarked and value.ndim and tuple(value.shape) == declared.local_shape:
        return view_boxes(value, declared, subject)  # states do not inherit the attributes
    if (
        not isinstance(value, DTensor)
        and value.numel() > 1
        and ref.tensor.is_divided()
        and not is_checkpointable(value)
    ):
        raise UnsupportedTensorError(
            f"{subject} is a plain tensor of shape {list(value.shape)}, and its parameter is sharded: it is "
            "unknown which part of the state it holds (as for block-quantized states)"
        )
    return view_of(value, subject)
