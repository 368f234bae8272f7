"""States that are no tensors: objects of the optimizer's own package, such as GaLore's projector, and collections.

An object is stored by its attributes. Tensors like a parameter in its collections, such as a queue of its gradients,
are stored as states of their own, so that they are divided like the parameter in any layout.

:mod:`rankless.state.optimizer.optimizer_view` describes and splits states on each rank of a save;
:mod:`rankless.state.optimizer.optimizer_restore` joins and builds them. The keys that begin with ``rankless.`` are in
files.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rankless.errors import OptimizerMismatchError
from rankless.ondisk.values import MAX_DEPTH

_OBJECT, _ATTRIBUTES = "rankless.object", "attributes"

#: The key of the table that takes the place of a tensor that is a state of its own.
_PART = "rankless.part"


#: The types of collections that may have objects or tensors as elements.
COLLECTIONS = frozenset({dict, list, tuple, deque})


def map_elements(state: Any, function: Callable[[Any], Any]) -> Any:
    """Return a collection of the same type with the results of a function of its elements; other values unchanged."""
    if type(state) is dict:
        return {key: function(value) for key, value in state.items()}
    if type(state) in {list, tuple}:
        return type(state)(map(function, state))
    return deque(map(function, state), state.maxlen) if type(state) is deque else state


def describe_objects(state: Any, optimizer: object, depth: int = 0) -> Any:
    """Return a state with a table of the class and the attributes in place of each object of the optimizer's package.

    Anything else is left as it is, for the encoder to store or to refuse: also values deeper than it stores.
    """
    kind = type(state)
    if depth > MAX_DEPTH:
        return state
    if not _is_own_class(kind, optimizer) or not _is_plain_object(state):
        return map_elements(state, lambda element: describe_objects(element, optimizer, depth + 1))
    if isinstance(state, Enum):
        return {_OBJECT: f"{kind.__module__}:{kind.__qualname__}", _ATTRIBUTES: state.value}
    attributes = {name: describe_objects(value, optimizer, depth + 1) for name, value in vars(state).items()}
    return {_OBJECT: f"{kind.__module__}:{kind.__qualname__}", _ATTRIBUTES: attributes}


def build_objects(state: Any, optimizer: object, device: torch.device) -> Any:
    """Return a state with the objects that :func:`describe_objects` described. Tensors in it are on ``device``.

    No code of a class is run. Raises ``OptimizerMismatchError`` if the optimizer's package has no such class.
    """
    if isinstance(state, torch.Tensor):
        return state.to(device)
    if not _is_object(state):
        return map_elements(state, lambda element: build_objects(element, optimizer, device))
    module, _, name = str(state[_OBJECT]).partition(":")
    kind = vars(sys.modules[module]).get(name) if module in sys.modules else None
    if not isinstance(kind, type) or not _is_own_class(kind, optimizer):
        raise OptimizerMismatchError(
            f"the checkpoint has an optimizer state of the class {name} of {module}, which is not in the package of "
            f"{type(optimizer).__qualname__}: install the version of the package that saved it"
        )
    if issubclass(kind, Enum):
        return kind(state[_ATTRIBUTES])
    built: Any = object.__new__(kind)
    vars(built).update(build_objects(state[_ATTRIBUTES], optimizer, device))
    return built


def _is_object(state: Any) -> bool:
    """Return whether a stored value describes an object."""
    return isinstance(state, Mapping) and state.keys() == {_OBJECT, _ATTRIBUTES}


def _is_plain_object(state: Any) -> bool:
    """Return whether an object is a member of an enumeration, or has nothing but its attributes in ``__dict__``."""
    kind = type(state)
    if isinstance(state, Enum):
        return True
    if not hasattr(state, "__dict__") or any(vars(base).get("__slots__") for base in kind.__mro__):
        return False
    try:
        object.__new__(kind)
    except TypeError:  # a list, a number, a tensor or an array: its contents are no attributes
        return False
    return True


def _is_own_class(kind: type, optimizer: object) -> bool:
    """Return whether a class is of the package that the optimizer's class is of, and not one of torch or Python."""
    package = type(optimizer).__module__.partition(".")[0]
    return kind.__module__.partition(".")[0] == package and package != "torch"


def split_states(states: Mapping[str, Any], parameter: Any) -> Mapping[str, Any]:
    """Return states with the tensors in collections that are sharded, or have the parameter's shape, next to them.

    A table with the name of such a state takes the tensor's place. For example, the first such tensor in the state
    ``history`` becomes the state ``history.0``.
    """
    parts: dict[str, torch.Tensor] = {}
    kept = {name: _split(value, str(name), parameter, parts) for name, value in states.items()}
    return {**kept, **parts} if parts.keys().isdisjoint(kept) else states


def _split(value: Any, name: str, parameter: Any, parts: dict[str, torch.Tensor]) -> Any:
    def replace(element: Any) -> Any:
        if not isinstance(element, torch.Tensor):
            return _split(element, name, parameter, parts)
        is_like = isinstance(parameter, torch.Tensor) and element.ndim > 0 and element.shape == parameter.shape
        if not is_like and not isinstance(element, DTensor):
            return element
        place = f"{name}.{sum(part.startswith(f'{name}.') for part in parts)}"
        parts[place] = element
        return {_PART: place}

    return map_elements(value, replace)


def join_states(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states that :func:`split_states` split."""
    used: set[str] = set()

    def replace(value: Any) -> Any:
        if type(value) is not dict or value.keys() != {_PART} or value[_PART] not in states:
            return map_elements(value, replace)
        used.add(value[_PART])
        return states[value[_PART]]

    joined = {name: replace(value) for name, value in states.items()}
    return {name: value for name, value in joined.items() if name not in used}
