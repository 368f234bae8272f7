"""Trees of dicts and lists, compared without their leaves' values.

:mod:`rankless.lightning.dumped_state` compares with it, on each rank.
"""

from __future__ import annotations

from typing import Any


def copy_containers(value: Any) -> Any:
    """Copy the dicts and lists of a tree, but not the leaves."""
    if isinstance(value, dict):
        return {key: copy_containers(item) for key, item in value.items()}
    return [copy_containers(item) for item in value] if isinstance(value, list) else value


def has_same_leaves(value: Any, other: Any) -> bool:
    """Return whether two trees have the same keys, and the same objects as leaves."""
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(has_same_leaves(value[key], other[key]) for key in value)
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(has_same_leaves, value, other))
    return value is other
