"""Models seen alike, whatever they are: tensors and values by name, and parameters as optimizers know them."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch
from torch import nn

from holdfast.engine.plan.split_tensors import Splits
from holdfast.errors import StateError
from holdfast.state.model.fsdp1 import FlatShard
from holdfast.state.model.load_hooks import HookedLoader
from holdfast.state.tensors import TensorView

#: The name under which ``state_dict`` keeps what ``get_extra_state`` returns.
EXTRA = "_extra_state"


def is_extra(name: str) -> bool:
    """Whether an entry of a state dict is what ``get_extra_state`` returned."""
    return name.rpartition(".")[2] == EXTRA


@dataclass(frozen=True)
class ParamRef:
    """A parameter as an optimizer knows it: its name, and what its states are laid out like.

    ``flat`` tells where it is in a flat parameter of FSDP1, several of which an optimizer may know as one. ``splits``
    are what it is stored as, where that is not one tensor of its name.
    """

    name: str
    like: TensorView
    flat: FlatShard | None = None
    splits: Splits = ()

    def with_prefix(self, prefix: str) -> ParamRef:
        """The same with ``prefix`` before its name, and before those that it is stored under."""
        splits = tuple(msgspec.structs.replace(split, name=prefix + split.name) for split in self.splits)
        return replace(self, name=prefix + self.name, splits=splits)


@dataclass
class ModelView:
    """A model as a checkpoint sees it.

    ``tensors`` are live, each once, by FQN; ``splits`` tell of those that are stored in parts under names of their own;
    ``twins`` are further ones that several parts of the model have under one name; ``tied`` maps further names of one
    to the name it has there. ``handles`` are the parameters by ``id``. ``extra`` are values of a state dict that are no
    tensors, and what ``get_extra_state`` gave, by name, with ``owners`` of them to be given them back under the name
    that they have there. ``loaders`` are the modules, whose load hooks are to be run.
    """

    tensors: dict[str, TensorView] = field(default_factory=dict)
    splits: dict[str, Splits] = field(default_factory=dict)
    twins: list[tuple[str, TensorView]] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)
    handles: dict[int, tuple[ParamRef, ...]] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    owners: dict[str, tuple[nn.Module | MutableMapping[str, Any], str]] = field(default_factory=dict)
    loaders: list[HookedLoader] = field(default_factory=list)

    def put_extra(self, name: str, value: object) -> None:
        """Give back one of ``extra``, but for a value that only ``load_state_dict`` knows where to put."""
        owner, inside = self.owners[name]
        if not isinstance(owner, nn.Module):
            owner[inside] = value
        elif is_extra(inside):
            owner.get_submodule(inside.removesuffix(EXTRA).removesuffix(".")).set_extra_state(value)


def merge_views(whole: ModelView, one: ModelView) -> None:
    """Take the names of another view in. Raises ``StateError`` where two different tensors have one name."""
    for name, tensor in one.tensors.items():
        known = whole.tensors.setdefault(name, tensor)
        if known.local is not tensor.local:
            if (known.dtype, known.shape, known.layout) != (tensor.dtype, tensor.shape, tensor.layout):
                raise StateError(f"two parts of the model have different tensors named {name!r}")
            whole.twins.append((name, tensor))
    whole.twins += one.twins
    whole.loaders += one.loaders
    pairs = (whole.tied, one.tied), (whole.extra, one.extra), (whole.owners, one.owners), (whole.splits, one.splits)
    for mine, others in pairs:
        mine.update(others)  # type: ignore[arg-type]
    whole.buffers |= one.buffers
    whole.handles |= one.handles


def check_duplicate_tensors(found: ModelView) -> None:
    """Raise ``StateError`` where parts of a model hold different values under one name."""
    for name, tensor in found.twins:
        if not torch.equal(tensor.local, found.tensors[name].local):
            raise StateError(f"two parts of the model hold different values of {name!r}; give them names of their own")
