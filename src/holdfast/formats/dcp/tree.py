"""Flat names with paths, put back into the tree of dicts and lists that was saved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from holdfast.errors import DamagedError
from holdfast.formats.arrange.trees import Path, show

#: A list that was saved may lack empty dicts; with more missing than this, its numbers are none.
_MISSING = 64


def nested(entries: Iterable[tuple[Path, Any]]) -> dict[str, Any]:
    """The tree of some values by their paths; numbers are places in lists. Raises ``DamagedError``."""
    root: dict[Any, Any] = {}
    nodes = {(): root}
    for path, value in entries:
        node = root
        for depth in range(1, len(path)):
            inner = nodes.get(path[:depth])
            if inner is None:
                inner = nodes[path[:depth]] = {}
                _put(node, path[:depth], inner)
            node = inner
        _put(node, path, value)
    for path in sorted(nodes, key=len, reverse=True):
        if path and any(type(key) is int for key in nodes[path]):
            nodes[path[:-1]][path[-1]] = _listed(nodes[path], path)
    return root


def _put(node: dict[Any, Any], path: Path, value: Any) -> None:
    if path[-1] in node:
        raise DamagedError(f"two values are at {show(path)}")
    node[path[-1]] = value


def _listed(node: dict[Any, Any], path: Path) -> list[Any]:
    numbers = [key for key in node if type(key) is int]
    last = max(numbers)
    if len(numbers) < len(node) or min(numbers) < 0 or last >= len(node) + _MISSING:
        raise DamagedError(f"the items of {show(path)} are not those of a list")
    return [node.get(number, {}) for number in range(last + 1)]
