"""Uniform views of models: tensors and values by name, and references to parameters as optimizers see them."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import msgspec
import torch
from torch import nn

from rankless.engine.plan.split_tensors import Splits
from rankless.errors import StateError
from rankless.state.model.flat_shards import FlatShard
from rankless.state.model.load_hooks import HookedLoader
from rankless.state.tensor_views import TensorView
from rankless.state.user_objects import loading_code

#: The name under which ``state_dict`` returns the result of ``get_extra_state``.
EXTRA = "_extra_state"


def is_extra(name: str) -> bool:
    """Return whether an entry of a state dict is the result of ``get_extra_state``."""
    return name.rpartition(".")[2] == EXTRA


class ParamRef(msgspec.Struct, frozen=True):
    """A reference from an optimizer to a parameter: its name, and ``tensor``, whose layout its states share.

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


class ModelView(msgspec.Struct):
    """A model as a checkpoint sees it.

    ``tensors`` are live, each once, by FQN; ``splits`` describe those that are stored as several tensors under other
    names; ``wrappers`` describe those of wrapper subclasses, whose inner tensors are in ``tensors``; ``frozen`` are the
    names of parameters without gradients; ``duplicates`` are further tensors that several parts of the model have under
    one name; ``tied`` maps further names of a tensor to its name in ``tensors``. ``refs`` are the parameters by ``id``.
    ``extra`` are values of a state dict that are not tensors, and results of ``get_extra_state``, by name; ``owners``
    are the objects that they are given back to, with the name that they have there. ``overwritten`` are the names of
    buffers that DDP replaces by those of another rank before the next step. ``loaders`` are the modules whose
    load hooks must run.
    """

    tensors: dict[str, TensorView] = msgspec.field(default_factory=dict)
    splits: dict[str, Splits] = msgspec.field(default_factory=dict)
    wrappers: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    duplicates: list[tuple[str, TensorView]] = msgspec.field(default_factory=list)
    tied: dict[str, str] = msgspec.field(default_factory=dict)
    buffers: set[str] = msgspec.field(default_factory=set)
    frozen: set[str] = msgspec.field(default_factory=set)
    refs: dict[int, tuple[ParamRef, ...]] = msgspec.field(default_factory=dict)
    extra: dict[str, Any] = msgspec.field(default_factory=dict)
    owners: dict[str, tuple[nn.Module | MutableMapping[str, Any], str]] = msgspec.field(default_factory=dict)
    overwritten: set[str] = msgspec.field(default_factory=set)
    loaders: list[HookedLoader] = msgspec.field(default_factory=list)

    def set_extra(self, name: str, value: object) -> None:
        """Give one of ``extra`` back to its owner, unless only the owner's ``load_state_dict`` can take it."""
        owner, inner_name = self.owners[name]
        if not isinstance(owner, nn.Module):
            owner[inner_name] = value
        elif is_extra(inner_name):
            module = owner.get_submodule(inner_name.removesuffix(EXTRA).removesuffix("."))
            with loading_code(module, "model"):
                module.set_extra_state(value)


def merge_views(merged: ModelView, view: ModelView) -> None:
    """Add another view to ``merged``. Raises ``StateError`` if two different tensors have one name."""
    for name, tensor in view.tensors.items():
        first = merged.tensors.setdefault(name, tensor)
        if first.local is not tensor.local:
            kinds = [(either.dtype, either.shape, either.layout, either.pieces) for either in (first, tensor)]
            if kinds[0] != kinds[1]:
                raise StateError(f"two parts of the model have different tensors named {name!r}")
            merged.duplicates.append((name, tensor))
    merged.duplicates += view.duplicates
    merged.loaders += view.loaders
    pairs = (
        (merged.tied, view.tied),
        (merged.extra, view.extra),
        (merged.owners, view.owners),
        (merged.splits, view.splits),
        (merged.wrappers, view.wrappers),
    )
    for target, source in pairs:
        target.update(source)  # type: ignore[arg-type]
    merged.buffers |= view.buffers
    merged.overwritten |= view.overwritten
    merged.frozen |= view.frozen
    merged.refs |= view.refs


def check_duplicate_tensors(view: ModelView) -> None:
    """Raise ``StateError`` if parts of a model hold different values under one name."""
    for name, tensor in view.duplicates:
        if not torch.equal(tensor.local, view.tensors[name].local):
            raise StateError(f"two parts of the model hold different values of {name!r}; give them different names")
