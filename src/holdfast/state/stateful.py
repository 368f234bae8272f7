"""Objects with ``state_dict`` and ``load_state_dict``: loss scalers, averages of weights, data loaders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.errors import InvalidArgumentError


def check_stateful(stateful: object) -> Mapping[str, Any]:
    """A dict of objects that have a state. Raises ``InvalidArgumentError`` for anything else."""
    if not isinstance(stateful, Mapping) or not all(isinstance(name, str) for name in stateful):
        raise InvalidArgumentError(
            f"stateful is a dict of objects by name, such as {{'scaler': scaler}}, not {type(stateful).__qualname__}"
        )
    return {name: check_stateful_object(one, f"stateful object {name!r}") for name, one in stateful.items()}


def check_stateful_object(one: Any, what: str) -> Any:
    """An object that has a state. Raises ``InvalidArgumentError`` naming ``what`` it is where it has none."""
    if not hasattr(one, "state_dict") or not hasattr(one, "load_state_dict"):
        raise InvalidArgumentError(
            f"{what} must have state_dict() and load_state_dict(); {type(one).__qualname__} lacks them"
        )
    return one
