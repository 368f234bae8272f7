"""Parsing the shapes of the parameters in a file of a model, in the order in which ZeRO concatenates them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankless.errors import CorruptCheckpointError
from rankless.formats.deepspeed.partitions import Shapes
from rankless.ondisk.read_budget import ReadBudget

#: The most dimensions of a parameter, and the limit of its number of elements.
_DIMENSIONS, _LARGEST = 64, 2**60

#: Steps for a parameter, and for each of its dimensions.
_PARAMETER = 4


def parse_shape_groups(value: Any, path: Path, budget: ReadBudget) -> list[Shapes]:
    """Return the shapes of each group, or of each sub-group of ZeRO-3. Versions before 0.4 have one dict.

    Raises ``CorruptCheckpointError`` if they are not shapes by name, or if a name is in two groups.
    """
    groups = [value] if isinstance(value, dict) else value
    if not isinstance(groups, list):
        raise CorruptCheckpointError(f"{path}: param_shapes must be a list of dicts")
    parsed = [parse_shapes(group, "param_shapes", path, budget) for group in groups]
    names: set[str] = set()
    for shapes in parsed:
        duplicate = next((name for name in shapes if name in names), None)
        if duplicate is not None:
            raise CorruptCheckpointError(f"{path}: param_shapes has the parameter {duplicate!r:.100} in two groups")
        names |= shapes.keys()
    return parsed


def parse_shapes(value: Any, key: str, path: Path, budget: ReadBudget) -> Shapes:
    """Return the shapes in a dict. Raises ``CorruptCheckpointError`` if it is not one of shapes by name."""
    if not isinstance(value, Mapping):
        raise CorruptCheckpointError(f"{path}: {key} must have the shapes of parameters by their names")
    return {_check_name(name, key, path): _check_shape(shape, name, path, budget) for name, shape in value.items()}


def _check_name(name: Any, key: str, path: Path) -> str:
    if not isinstance(name, str):
        raise CorruptCheckpointError(f"{path}: a name in {key} is not a text")
    return name


def _check_shape(shape: Any, name: str, path: Path, budget: ReadBudget) -> tuple[int, ...]:
    is_list = isinstance(shape, tuple | list) and len(shape) <= _DIMENSIONS
    if not is_list or not all(type(size) is int and 0 <= size < _LARGEST for size in shape):
        raise CorruptCheckpointError(f"{path}: the shape of {name!r:.100} is not a list of sizes")
    budget.spend(_PARAMETER * (1 + len(shape)))
    if math.prod(size or 1 for size in shape) >= _LARGEST:
        raise CorruptCheckpointError(f"{path}: the shape of {name!r:.100}, {list(shape)[:8]}, is too large")
    return tuple(shape)
