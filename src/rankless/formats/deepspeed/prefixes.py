"""Removal of the prefix that Lightning's strategy adds to the names of all parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: The attribute under which Lightning's strategy wraps the user's module.
_LIGHTNING = "_forward_module."


def strip_prefixes(components: Mapping[str, Any]) -> dict[str, Any]:
    """Return the components with names without the prefix, if all tensors of the model have it."""
    model = components["model"]
    if not model or not all(name.startswith(_LIGHTNING) for name in model):
        return dict(components)
    stripped = {**components, "model": _strip_keys(model)}
    optimizer = components.get("optimizer")
    if isinstance(optimizer, dict):
        stripped["optimizer"] = {
            "state": _strip_keys(optimizer["state"]),
            "param_groups": [
                {**group, "params": [_strip_name(name) for name in group["params"]]}
                for group in optimizer["param_groups"]
            ],
        }
    return stripped


def _strip_keys(table: Mapping[Any, Any]) -> dict[Any, Any]:
    return {_strip_name(key): value for key, value in table.items()}


def _strip_name(name: Any) -> Any:
    return name.removeprefix(_LIGHTNING) if isinstance(name, str) else name
