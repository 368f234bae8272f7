"""Formatting of the plain values of a checkpoint: in few lines for people, and as JSON for programs.

``rankless show``, ``stats`` and ``diff`` call it.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from rankless.inspection.brief_text import format_brief, is_brief
from rankless.inspection.placeholders import TensorPlaceholder

#: Types with items that get lines of their own if the value is long.
_CONTAINERS = (dict, list, tuple, Namespace)

#: The maximum number of items of a list that get lines of their own.
_MAX_ITEMS = 5


def format_lines(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Iterate over a tree as ``(path, text)`` lines. A value that does not fit on one line gets a line per item.

    For example, the path of an item may be ``groups[0].lr``.
    """
    value = vars(value) if isinstance(value, Namespace) else value
    short = bool(path) and is_brief(value)
    if isinstance(value, dict) and value and not short:
        for key, item in value.items():
            yield from format_lines(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple) and not short and any(isinstance(item, _CONTAINERS) for item in value):
        for i, item in enumerate(value[:_MAX_ITEMS]):
            yield from format_lines(item, f"{path}[{i}]")
        if len(value) > _MAX_ITEMS:
            yield f"{path}[{_MAX_ITEMS}:]", f"{len(value) - _MAX_ITEMS:,} more"
    else:
        yield path, format_brief(value)


def as_plain_value(value: Any) -> Any:
    """Return the closest JSON value: lists for tuples and sets, descriptions for tensors, text for other types."""
    if isinstance(value, TensorPlaceholder):
        return {"kind": value.kind, "dtype": value.info.dtype, "shape": list(value.info.shape)}
    if isinstance(value, Namespace | Mapping):
        table = vars(value) if isinstance(value, Namespace) else value
        return {str(key): as_plain_value(item) for key, item in table.items()}
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [as_plain_value(item) for item in value]
    is_json = value is None or isinstance(value, int | str) or (isinstance(value, float) and math.isfinite(value))
    return value if is_json else str(value)
