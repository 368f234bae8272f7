"""Uniform views of models: tensors and values by name, and references to parameters as optimizers see them.

:mod:`rankless.state.model.model_traversal` makes the views on each rank; captures and restores read them, and the
optimizer's views find parameters in ``refs``.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from rankless.engine.plan.split_tensors import Splits
from rankless.errors import StateError
from rankless.state.model.flat_shards import FlatShard
from rankless.state.model.load_hooks import HookedLoader
from rankless.state.tensor_views import TensorView
from rankless.state.user_objects import loading_code

#: The name of the result of ``get_extra_state`` in a ``state_dict``.
EXTRA = "_extra_state"


def is_extra(name: str) -> bool:
    """Return whether an entry of a state dict is the result of ``get_extra_state``."""
    return name.rpartition(".")[2] == EXTRA


class ParamRef(msgspec.Struct, frozen=True):
    """A reference from an optimizer to a parameter: its name, and ``tensor``; its states share the tensor's layout.

    ``flat`` is its place in a flat parameter of FSDP1, which an optimizer may see as one parameter for several.
    ``splits`` are the tensors that it is stored as, if it is not stored as one tensor of its name.
    """

    name: str
    tensor: TensorView
    flat: FlatShard | None = None
    splits: Splits = ()

    def with_prefix(self, prefix: str) -> ParamRef:
        """Return the same reference with ``prefix`` before its name, and before the names that it is stored under."""
        splits = tuple(msgspec.structs.replace(split, name=prefix + split.name) for split in self.splits)
        return msgspec.structs.replace(self, name=prefix + self.name, splits=splits)


class Owner(NamedTuple):
    """The module or state dict that has a value, or a result of ``get_extra_state``, under a name."""

    holder: nn.Module | MutableMapping[str, Any]
    name: str
    value: Any

    def find_identity(self) -> tuple[int, str]:
        """Return the ``id`` of the module or state dict itself, and the name that it has the value under."""
        if not isinstance(self.holder, nn.Module) or not is_extra(self.name):
            return id(self.holder), self.name
        return id(self.holder.get_submodule(self.name.removesuffix(EXTRA).removesuffix("."))), EXTRA


class ModelView(msgspec.Struct):
    """A model as a checkpoint sees it.

    ``tensors`` are live, each once, by FQN. ``splits`` describe tensors that are stored as several tensors under other
    names. ``wrappers`` describe tensors of wrapper subclasses; ``tensors`` has the inner tensors. ``frozen`` are the
    names of parameters without gradients. ``left_out`` are parameters and persistent buffers that the model's
    ``state_dict`` does not return, by their own names. ``duplicates`` are further tensors that several parts of the
    model have under one name. ``tied`` maps further names of a tensor to its name in ``tensors``, for example
    ``lm_head.weight`` to ``embed.weight``. ``refs`` are the parameters by ``id``. ``extra`` are values of a state dict
    that are not tensors, and results of ``get_extra_state``, by name; ``owners`` are the objects that they are given
    back to, each with its value and the name that it has there. ``overwritten`` are the names of buffers that DDP
    replaces by another rank's buffers before the next step. ``loaders`` are the modules with load hooks that must run.
    """

    tensors: dict[str, TensorView] = msgspec.field(default_factory=dict)
    splits: dict[str, Splits] = msgspec.field(default_factory=dict)
    wrappers: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    duplicates: list[tuple[str, TensorView]] = msgspec.field(default_factory=list)
    tied: dict[str, str] = msgspec.field(default_factory=dict)
    buffers: set[str] = msgspec.field(default_factory=set)
    frozen: set[str] = msgspec.field(default_factory=set)
    left_out: dict[str, torch.Tensor] = msgspec.field(default_factory=dict)
    refs: dict[int, tuple[ParamRef, ...]] = msgspec.field(default_factory=dict)
    extra: dict[str, Any] = msgspec.field(default_factory=dict)
    owners: dict[str, list[Owner]] = msgspec.field(default_factory=dict)
    overwritten: set[str] = msgspec.field(default_factory=set)
    loaders: list[HookedLoader] = msgspec.field(default_factory=list)

    def set_extra(self, name: str, value: object) -> None:
        """Give one of ``extra`` back to its owners, unless only an owner's ``load_state_dict`` can take it."""
        for owner in self.owners[name]:
            _give_back(owner, value)


def _give_back(owner: Owner, value: object) -> None:
    if not isinstance(owner.holder, nn.Module):
        owner.holder[owner.name] = value
    elif is_extra(owner.name):
        module = owner.holder.get_submodule(owner.name.removesuffix(EXTRA).removesuffix("."))
        with loading_code(module, "model"):
            module.set_extra_state(value)


def merge_views(merged: ModelView, view: ModelView) -> None:
    """Add another view to ``merged``. Raises ``StateError`` if two different tensors have one name.

    A tensor that parts have under several names is tied, as in one part. A name that is tied in one part, and has a
    tensor of its own in another, has both tensors.
    """
    ties = _find_ties(merged, view)
    for name, tensor in view.tensors.items():
        if name in ties:
            continue
        first = merged.tensors.setdefault(name, tensor)
        if first.local is not tensor.local:
            kinds = [(either.dtype, either.shape, either.layout, either.pieces) for either in (first, tensor)]
            if kinds[0] != kinds[1]:
                raise StateError(f"two parts of the model have different tensors named {name!r}")
            merged.duplicates.append((name, tensor))
    merged.duplicates += view.duplicates
    tied = merged.tied | {alias: ties.get(name, name) for alias, name in view.tied.items()} | ties
    for alias in [alias for alias in tied if alias in merged.tensors]:
        target = tied.pop(alias)
        merged.duplicates.append((alias, merged.tensors[target]))
    merged.tied = tied
    merged.loaders += view.loaders
    merged.extra |= view.extra
    merged.splits |= view.splits
    merged.wrappers |= view.wrappers
    for name, owners in view.owners.items():
        known = merged.owners.setdefault(name, [])
        known += [owner for owner in owners if all(owner.holder is not other.holder for other in known)]
    merged.buffers |= view.buffers
    merged.overwritten |= view.overwritten
    merged.frozen |= view.frozen
    merged.refs = view.refs | merged.refs
    left_out = merged.left_out | view.left_out
    merged.left_out = {name: tensor for name, tensor in left_out.items() if name not in merged.tensors}


def _find_ties(merged: ModelView, view: ModelView) -> dict[str, str]:
    """Return the names in ``view`` of tensors that ``merged`` has under other names, which are the values."""
    shared = [(merged.refs[identity], refs) for identity, refs in view.refs.items() if identity in merged.refs]
    names = {refs[0].name: known[0].name for known, refs in shared if len(known) == len(refs) == 1}
    return {
        name: known
        for name, known in names.items()
        if name != known and name not in merged.tensors and view.tensors[name].local is merged.tensors[known].local
    }


def check_duplicate_tensors(view: ModelView) -> None:
    """Raise ``StateError`` if parts of a model hold different values under one name."""
    for name, tensor in view.duplicates:
        if not torch.equal(tensor.local, view.tensors[name].local):
            raise StateError(f"two parts of the model hold different values of {name!r}; give them different names")
