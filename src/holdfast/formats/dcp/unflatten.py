"""Flat names with paths, put back into the tree of dicts and lists that was saved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from holdfast.errors import CorruptCheckpointError
from holdfast.formats.tree.traversal import Path, show_path

#: A list that was saved may lack empty dicts; with more missing than this, its numbers are none.
_MISSING = 64


class _Node(dict[Any, Any]):
    """A dict or list that was flattened; other dicts are values."""


def unflatten(entries: Iterable[tuple[Path, Any]]) -> dict[str, Any]:
    """The tree of some values by their paths; numbers are places in lists. Raises ``CorruptCheckpointError``."""
    root = _Node()
    for path, value in entries:
        node = root
        for depth, part in enumerate(path[:-1], 1):
            inner = node.get(part)
            if inner is None and part not in node:
                inner = node[part] = _Node()
            if not isinstance(inner, _Node):
                raise CorruptCheckpointError(f"two values are at {show_path(path[:depth])}")
            node = inner
        if path[-1] in node:
            raise CorruptCheckpointError(f"two values are at {show_path(path)}")
        node[path[-1]] = value
    return {part: _plain(inner, (part,)) for part, inner in root.items()}


def _plain(node: Any, path: Path) -> Any:
    """Dicts and lists for nodes."""
    if not isinstance(node, _Node):
        return node
    items = {part: _plain(inner, (*path, part)) for part, inner in node.items()}
    return _listed(items, path) if any(type(part) is int for part in items) else items


def _listed(node: dict[Any, Any], path: Path) -> list[Any]:
    numbers = [key for key in node if type(key) is int]
    last = max(numbers)
    if len(numbers) < len(node) or min(numbers) < 0 or last >= len(node) + _MISSING:
        raise CorruptCheckpointError(f"the items of {show_path(path)} are not those of a list")
    return [node.get(number, {}) for number in range(last + 1)]
