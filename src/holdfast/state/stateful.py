"""Objects with ``state_dict`` and ``load_state_dict``: loss scalers, averages of weights, data loaders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.errors import InvalidArgumentError


def values(stateful: object) -> dict[str, Any]:
    """The state of each of a dict of objects. Raises ``InvalidArgumentError`` for what has none."""
    if not isinstance(stateful, Mapping) or not all(isinstance(name, str) for name in stateful):
        raise InvalidArgumentError(
            f"stateful is a dict of objects by name, such as {{'scaler': scaler}}, not {type(stateful).__qualname__}"
        )
    return {name: state_of(one, f"stateful object {name!r}") for name, one in stateful.items()}


def state_of(one: Any, what: str) -> Any:
    """The state of an object. Raises ``InvalidArgumentError`` naming ``what`` it is where it has none."""
    if not hasattr(one, "state_dict") or not hasattr(one, "load_state_dict"):
        raise InvalidArgumentError(
            f"{what} must have state_dict() and load_state_dict(); {type(one).__qualname__} lacks them"
        )
    return one.state_dict()
