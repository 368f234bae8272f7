"""Walking and copying untrusted trees. Their depth, and the work of walking them, is bounded.

The modules of ``formats/tree`` and readers of other systems walk trees with it. Each visit must be charged to a budget,
or have been.
"""

from __future__ import annotations

import datetime as dt
import pathlib
from argparse import Namespace
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from uuid import UUID

from rankless.errors import CorruptCheckpointError
from rankless.ondisk.hash_limits import check_hashes
from rankless.ondisk.read_budget import ReadBudget
from rankless.ondisk.validation import check_utf8
from rankless.ondisk.values import MAX_DEPTH

#: The path of a value in a tree: keys and indices.
Path = tuple[Any, ...]

#: A function that is called with the path and the value of a leaf: a value that is neither plain nor a container.
Leaf = Callable[[Path, Any], Any]

#: The longest name of a tensor, and the longest part of a path in messages, in characters.
LONGEST, _SHOWN = 4096, 60

#: The suffix of the keys of extra state.
_EXTRA = "_extra_state"

#: Units of work for an entry of a model's state dict.
_ENTRY = 4

_PLAIN = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, UUID),
        *(dt.datetime, dt.date, dt.time, dt.timedelta, dt.timezone),
        *(pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath),
    }
)


def show_path(path: Path) -> str:
    """Return a path for messages, for example ``model.layers.0``. It is the same on all ranks."""
    return ".".join(_part_text(part)[:_SHOWN] for part in path)


def show_key_path(path: Path) -> str:
    """Return a path for messages that shows the types of keys, for example ``['a'][1]``."""
    return "".join(f"[{repr(part)[:_SHOWN] if isinstance(part, _WRITTEN) else _part_text(part)}]" for part in path)


#: Types of keys that are shown by their value.
_WRITTEN = (str, int, float, complex, bytes, tuple, type(None))


def _part_text(part: Any) -> str:
    text = str(part) if isinstance(part, _WRITTEN) else type(part).__name__
    return text.encode(errors="backslashreplace").decode()


def path_name(path: Path, budget: ReadBudget) -> str:
    """Return the path joined by dots: a name of any length. Lone surrogates in converted keys are escaped."""
    name = ".".join(part if type(part) is str else _part_text(part) for part in path)
    budget.spend_memory(len(name) + 8 * len(path))
    return name


def join_path(path: Path, budget: ReadBudget) -> str:
    """Return the path joined by dots. Raises ``CorruptCheckpointError`` if it is too long or not valid UTF-8."""
    name = path_name(path, budget)
    if len(name) > LONGEST:
        raise CorruptCheckpointError(
            f"the name {name[:_SHOWN]!r}… has {len(name)} characters; at most {LONGEST} are allowed"
        )
    try:
        return check_utf8(name, "a name")
    except ValueError as error:
        raise CorruptCheckpointError(str(error)) from error


def is_extra(key: object) -> bool:
    """Return whether a key of a model's state dict is a key of extra state, which is read as a value."""
    return isinstance(key, str) and key.endswith(_EXTRA)


def iterate_leaves(tree: Mapping[Any, Any], budget: ReadBudget, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the entries of a model's state dict with their paths, including entries of nested dicts."""
    for key, value in tree.items():
        budget.spend(_ENTRY + len(path))
        here = (*path, key)
        if isinstance(value, dict) and value and not is_extra(key):
            check_depth(here)
            yield from iterate_leaves(value, budget, here)
        else:
            yield here, value


def visit_tree(tree: Any, leaf: Leaf) -> None:
    """Call ``leaf`` for each value of a tree that is neither plain nor a container, once, with its first path."""
    _Visit(leaf).visit_value(tree, ())


class _Visit:
    def __init__(self, leaf: Leaf) -> None:
        self._leaf = leaf
        self._seen: set[int] = set()

    def visit_value(self, value: Any, path: Path) -> None:
        """Visit a value and everything in it."""
        kind = type(value)
        if kind in _PLAIN or id(value) in self._seen:
            return
        self._seen.add(id(value))
        check_depth(path)
        if kind in _ROWS:
            for number, item in enumerate(value):
                if type(item) not in _PLAIN:
                    self.visit_value(item, (*path, number))
        elif kind in _TABLES or kind is Namespace:
            for key, item in (vars(value) if kind is Namespace else value).items():
                if type(key) not in _PLAIN:
                    self.visit_value(key, (*path, "key"))
                if type(item) not in _PLAIN:
                    self.visit_value(item, (*path, key))
        else:
            self._leaf(path, value)


_ROWS = frozenset({list, tuple, set, frozenset, deque})
_TABLES = frozenset({dict, OrderedDict, Counter})


def rebuild_tree(value: Any, leaf: Leaf) -> Any:
    """Return a copy of a tree: ``leaf`` replaces the values that are neither plain nor containers.

    A value that is referenced several times is copied once, and the copy is referenced several times.
    """
    return _Copy(leaf).copy_value(value, ())


class _Copy:
    """A copy in progress, with the one copy of each value."""

    def __init__(self, leaf: Leaf) -> None:
        self._leaf = leaf
        self._copies: dict[int, Any] = {}

    def copy_value(self, value: Any, path: Path) -> Any:
        """Return the copy of a value."""
        if type(value) in _PLAIN:
            return value
        if id(value) not in self._copies:
            check_depth(path)
            self._copies[id(value)] = self._copy_container(value, path)
        return self._copies[id(value)]

    def _copy_container(self, value: Any, path: Path) -> Any:
        kind = type(value)
        if kind in _ROWS:
            items = [
                item if type(item) in _PLAIN else self.copy_value(item, (*path, i)) for i, item in enumerate(value)
            ]
            if kind in {set, frozenset}:
                return kind(check_keys(items))
            return deque(items, value.maxlen) if kind is deque else items if kind is list else tuple(items)
        if kind in _TABLES:
            table = self._copy_pairs(value, path)
            return table if kind is dict else kind(table)
        if kind is Namespace:
            space = Namespace()
            vars(space).update(self._copy_pairs(vars(value), path))
            return space
        return self._leaf(path, value)

    def _copy_pairs(self, table: Mapping[Any, Any], path: Path) -> dict[Any, Any]:
        keys = [key if type(key) in _PLAIN else self.copy_value(key, (*path, "key")) for key in table]
        items = [item if type(item) in _PLAIN else self.copy_value(item, (*path, key)) for key, item in table.items()]
        return dict(zip(check_keys(keys), items, strict=True))


def check_keys(keys: list[Any]) -> list[Any]:
    """Return the keys. Raises ``CorruptCheckpointError`` if one is unhashable, or too many have the same hash."""
    try:
        for key in keys:
            if type(key) not in _PLAIN:
                hash(key)
        check_hashes(keys)
    except (TypeError, ValueError) as error:
        raise CorruptCheckpointError(str(error)) from error
    return keys


def check_depth(path: Path) -> None:
    """Raise ``CorruptCheckpointError`` if a path is longer than the levels that a tree may have."""
    if len(path) > MAX_DEPTH:
        raise CorruptCheckpointError(
            f"its values are nested deeper than {MAX_DEPTH} levels, or inside themselves: {show_path(path[:8])}…"
        )
