"""Checks of objects with ``state_dict`` and ``load_state_dict``: loss scalers, averages of weights, data loaders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankless.errors import InvalidArgumentError


def check_stateful(stateful: object) -> Mapping[str, Any]:
    """Return a dict of objects that have a state. Raises ``InvalidArgumentError`` for anything else."""
    if not isinstance(stateful, Mapping) or not all(isinstance(name, str) for name in stateful):
        raise InvalidArgumentError(
            "stateful must be a dict of objects by name, such as {'scaler': scaler}; got "
            f"{type(stateful).__qualname__}"
        )
    return {name: check_stateful_object(candidate, f"stateful object {name!r}") for name, candidate in stateful.items()}


def check_stateful_object(candidate: Any, subject: str) -> Any:
    """Return an object that has a state. Raises ``InvalidArgumentError``, which names ``subject``, if it has none."""
    if not hasattr(candidate, "state_dict") or not hasattr(candidate, "load_state_dict"):
        raise InvalidArgumentError(
            f"{subject} must have state_dict() and load_state_dict(); {type(candidate).__qualname__} lacks them"
        )
    return candidate
