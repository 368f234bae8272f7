"""An optimizer's state by parameter name, read at its own dtypes, without a step and without a cast.

``torch.optim.Optimizer.load_state_dict`` casts float32 moments of bfloat16 parameters down, and torch's
``get_optimizer_state_dict`` steps an optimizer that never stepped; neither is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.errors import StateError, UnsupportedTensorError
from holdfast.ondisk.validation import state_key
from holdfast.state.model import fsdp1
from holdfast.state.model.view import ModelView, ParamRef
from holdfast.state.optimizer.adapters import Key, OptimizerAdapter, adapt_optimizer
from holdfast.state.tensors import NAMES, TensorView, view_of


@dataclass(frozen=True)
class GroupMember:
    """One entry of a parameter group: what the optimizer knows it by, and the parameters that it is."""

    key: Key
    handles: tuple[ParamRef, ...]


@dataclass(frozen=True)
class ParamGroup:
    """A parameter group: ``number`` in its optimizer, ``settings`` live."""

    source: OptimizerAdapter
    number: int
    settings: dict[str, Any]
    members: list[GroupMember]

    def names(self) -> list[str]:
        """The names of its parameters."""
        return [handle.name for member in self.members for handle in member.handles]

    def values(self) -> dict[str, Any]:
        """What a checkpoint says of it."""
        settings = {name: value for name, value in self.settings.items() if name not in {"params", "param_names"}}
        return {
            "class": self.source.kind,
            "number": self.number,
            "params": self.names(),
            "ordered": True,
            "settings": settings,
        }


def view_groups(parts: Sequence[object], handles: Mapping[int, tuple[ParamRef, ...]] | None) -> list[ParamGroup]:
    """The parameter groups of the parts of an optimizer.

    Parameters are named by the model's ``handles``, else by the names that torch keeps in the groups, else by position.
    Raises ``StateError`` for a parameter that the model does not have, and for a name twice.
    """
    found = []
    for part in parts:
        seen = adapt_optimizer(part)
        position = 0
        for number, settings in enumerate(seen.groups):
            members = list(_members(settings, handles, number, position))
            found.append(ParamGroup(seen, number, settings, members))
            position += len(members)
    every = parameter_names(found)
    if len(every) != len(set(every)):
        twice = next(name for name in every if every.count(name) > 1)
        raise StateError(f"the optimizer, or two parts of it, have the parameter {twice!r} twice; pass the model, too")
    return found


def parameter_names(found: Sequence[ParamGroup]) -> list[str]:
    """The parameters of some groups."""
    return [name for group in found for name in group.names()]


def refs_for(slot: str, models: Mapping[str, ModelView]) -> dict[int, tuple[ParamRef, ...]] | None:
    """The handles for the optimizer in ``slot``; of several models, those of others than its own get their name."""
    if not models:
        return None
    own = "model" + slot.removeprefix("optimizer")
    found: dict[int, tuple[ParamRef, ...]] = {}
    for name, view in sorted(models.items(), key=lambda item: item[0] != own):
        prefix = "" if name in {own, "model"} else name.removeprefix("model/") + "/"
        for identity, handles in view.handles.items():
            found.setdefault(identity, tuple(one.with_prefix(prefix) for one in handles) if prefix else handles)
    return found


def _members(
    settings: Mapping[str, Any], handles: Mapping[int, tuple[ParamRef, ...]] | None, number: int, position: int
) -> Iterator[GroupMember]:
    kept = settings.get("param_names")
    for i, entry in enumerate(settings["params"]):
        if isinstance(entry, torch.Tensor) and handles is not None:
            yield GroupMember(entry, _known(entry, handles, f"parameter {i} of the optimizer's group {number}"))
        else:
            name = entry if isinstance(entry, str) else kept[i] if kept else str(position + i)
            like = view_of(entry, f"parameter {name!r}") if isinstance(entry, torch.Tensor) else _UNKNOWN
            yield GroupMember(entry, (ParamRef(name, like),))


#: What nothing is known of, in a state dict.
_UNKNOWN = TensorView("", (), None, torch.empty(0))


def _known(parameter: torch.Tensor, handles: Mapping[int, tuple[ParamRef, ...]], what: str) -> tuple[ParamRef, ...]:
    found = handles.get(id(parameter))
    if found is None:
        raise StateError(
            f"{what}, of shape {list(parameter.shape)}, is not one of the model's; make the optimizer after the model "
            "is wrapped, and pass the model that it trains, itself and not its state dict"
        )
    return found


def optimizer_tensors(found: Sequence[ParamGroup]) -> Iterator[tuple[str, TensorView]]:
    """The state tensors, live, by :func:`key`. Nothing is made up for parameters that have no state."""
    for member, states in _states(found):
        for state, value in states.items():
            if isinstance(value, torch.Tensor):
                for handle in member.handles:
                    yield state_key(handle.name, str(state)), place_states(handle, str(state), value)


def optimizer_values(found: Sequence[ParamGroup]) -> list[dict[str, Any]]:
    """All that is not a tensor of the state: each group's class, parameters and settings, and plain states."""
    plain: dict[str, dict[str, Any]] = {}
    for member, states in _states(found):
        for state, value in states.items():
            if not isinstance(value, torch.Tensor):
                for handle in member.handles:
                    plain.setdefault(handle.name, {})[str(state)] = value
    return [
        {**group.values(), "state": {name: plain[name] for name in group.names() if name in plain}} for group in found
    ]


def _states(found: Sequence[ParamGroup]) -> Iterator[tuple[GroupMember, Mapping[str, Any]]]:
    for group in found:
        for member in group.members:
            if group.source.owns(member.key):
                yield member, group.source.states(member.key)


def place_states(handle: ParamRef, state: str, value: torch.Tensor) -> TensorView:
    """A state tensor as a checkpoint sees it. Raises ``UnsupportedTensorError`` where its layout is not known."""
    if handle.flat is not None:
        local = fsdp1.flat_elements(handle.flat, value)
        if local is not None:
            return TensorView(NAMES[local.dtype], handle.like.shape, handle.like.layout, local)
    what = f"optimizer state {state_key(handle.name, state)!r}"
    if not isinstance(value, DTensor) and value.numel() > 1 and handle.like.is_divided():
        raise UnsupportedTensorError(
            f"{what} is a plain tensor of shape {list(value.shape)}, and its parameter is sharded: which part of "
            "what it is cannot be told (block-quantised states are like that)"
        )
    return view_of(value, what)
