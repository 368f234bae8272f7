"""Rebuilding the tree of dicts and lists that was saved, from the paths of its values.

:mod:`rankless.dcp.reader.dcp_directory` calls it on each rank that opens a folder. torch does not store empty dicts, so
a list may lack a few items. A forged index must not make a long list.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rankless.errors import CorruptCheckpointError
from rankless.formats.tree.tree_traversal import Path, show_path

#: Items of a list that may be missing, because empty dicts are not stored. A list that lacks more is corrupt.
_MISSING = 64


class _Node(dict[Any, Any]):
    """A dict or list that was flattened. Other dicts are values."""


def unflatten(entries: Iterable[tuple[Path, Any]]) -> dict[str, Any]:
    """Return the tree of values, given their paths; integers in a path are list indices.

    Raises ``CorruptCheckpointError`` if two values have the same path, if indices are mixed with names, or if too many
    are missing. For example, ``("a", 0)`` with 5 and ``("a", 1)`` with 6 give ``{"a": [5, 6]}``.
    """
    root = _Node()
    for path, value in entries:
        node = root
        for depth, part in enumerate(path[:-1], 1):
            inner = node.get(part)
            if inner is None and part not in node:
                inner = node[part] = _Node()
            if not isinstance(inner, _Node):
                raise CorruptCheckpointError(f"two values have the path {show_path(path[:depth])}")
            node = inner
        if path[-1] in node:
            raise CorruptCheckpointError(f"two values have the path {show_path(path)}")
        node[path[-1]] = value
    return {part: _to_containers(inner, (part,)) for part, inner in root.items()}


def _to_containers(node: Any, path: Path) -> Any:
    """Return the dict or list of a node; other values are returned as they are."""
    if not isinstance(node, _Node):
        return node
    items = {part: _to_containers(inner, (*path, part)) for part, inner in node.items()}
    return _to_list(items, path) if any(type(part) is int for part in items) else items


def _to_list(node: dict[Any, Any], path: Path) -> list[Any]:
    numbers = [key for key in node if type(key) is int]
    last = max(numbers)
    if len(numbers) < len(node) or min(numbers) < 0 or last >= len(node) + _MISSING:
        raise CorruptCheckpointError(f"the items of {show_path(path)} have indices that are not those of a list")
    return [node.get(number, {}) for number in range(last + 1)]
