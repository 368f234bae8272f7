"""The check that a load can tell an optimizer's values from values that stand for others in a checkpoint.

:mod:`rankless.state.optimizer.optimizer_view` checks on each rank, in the first vote of a save.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.nn.parameter import is_lazy

from rankless.errors import UnsupportedTensorError, UnsupportedValueError
from rankless.ondisk.values import MAX_DEPTH
from rankless.state.optimizer.object_states import COLLECTIONS
from rankless.state.optimizer.state_strides import is_order
from rankless.state.tensor_subclasses import is_description, is_wrapper
from rankless.state.tensor_views import PLAIN_CLASSES, local_tensor

#: Classes of values under a text that are stored as they are: most states.
_SIMPLE = PLAIN_CLASSES | {int, float, bool, type(None)}

#: The prefix of keys of tables that stand for objects, states and tensors.
_RESERVED = "rankless."


def check_states(states: Mapping[Any, Any], parameter: object, parameter_name: str) -> None:
    """Raise an error naming a state of a parameter that a load could not restore as it is.

    This is an ``UnsupportedTensorError`` for a tensor, else an ``UnsupportedValueError``. Called for each parameter of
    an optimizer that is saved.
    """
    for name, value in states.items():
        if type(value) in _SIMPLE and type(name) is str:
            continue
        subject = f"optimizer state {name!r} of {parameter_name!r}"
        if type(name) is not str:
            raise UnsupportedValueError(f"{subject}: states are stored by name, so that this key must be text")
        if is_order(value) or is_description(value):
            raise UnsupportedValueError(f"{subject} has the keys of a description of a tensor: rename one")
        is_plain = not isinstance(value, torch.Tensor) or type(local_tensor(value)) in PLAIN_CLASSES
        if not is_plain and not _keeps_class(value, parameter):
            raise UnsupportedTensorError(
                f"{subject} is a tensor of the class {type(value).__qualname__}, which would be loaded as a plain "
                "tensor: keep a plain one, from as_subclass(torch.Tensor)"
            )
        if type(value) in COLLECTIONS:
            check_tree(value, subject)


def _keeps_class(state: torch.Tensor, parameter: object) -> bool:
    """Return whether a load gives a state that is no plain tensor its class.

    Tensors without elements in memory have errors of their own.
    """
    local = local_tensor(state)
    if isinstance(local, AsyncCollectiveTensor | FakeTensor):
        return True
    is_alike = isinstance(parameter, torch.Tensor) and type(local) is type(local_tensor(parameter))
    return is_alike or is_wrapper(state) or is_lazy(local) or local.is_nested


def check_tree(tree: Any, subject: str, depth: int = 0) -> None:
    """Raise ``UnsupportedValueError`` if a tree has a table with a reserved key, or contains itself."""
    if depth > MAX_DEPTH:
        raise UnsupportedValueError(f"{subject} is nested deeper than {MAX_DEPTH} levels, or inside itself")
    reserved = [key for key in tree if isinstance(key, str) and key.startswith(_RESERVED)] if type(tree) is dict else []
    if reserved:
        raise UnsupportedValueError(
            f"{subject} has a table with the key {reserved[0]!r}: keys that begin with {_RESERVED!r} are reserved there"
        )
    if type(tree) in COLLECTIONS:
        for value in tree.values() if type(tree) is dict else tree:
            check_tree(value, subject, depth + 1)
