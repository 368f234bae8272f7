"""Walking a tree that somebody else made: how deep it is, and how much one is led to do, is bounded."""

from __future__ import annotations

import datetime as dt
import pathlib
from argparse import Namespace
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from uuid import UUID

from holdfast.errors import CorruptCheckpointError
from holdfast.ondisk.hash_limits import check_hashes
from holdfast.ondisk.read_budget import ReadBudget
from holdfast.ondisk.validation import check_utf8
from holdfast.ondisk.values import MAX_DEPTH

#: Where a value is in a tree: keys and numbers.
Path = tuple[Any, ...]

#: What becomes of a value that is neither plain nor a container.
Leaf = Callable[[Path, Any], Any]

#: The longest name of a tensor, and the longest part of a path that is shown, in characters.
LONGEST, _SHOWN = 4096, 60

#: What the names of extra state end with.
_EXTRA = "_extra_state"

#: Steps for an entry of a model's state.
_ENTRY = 4

_PLAIN = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, UUID),
        *(dt.datetime, dt.date, dt.time, dt.timedelta, dt.timezone),
        *(pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath),
    }
)


def show_path(path: Path) -> str:
    """A path for people, and the same on all ranks."""
    return ".".join(_part(part)[:_SHOWN] for part in path)


def show_key_path(path: Path) -> str:
    """A path for people that tells keys of different types apart: ``['a'][1]``."""
    return "".join(f"[{repr(part)[:_SHOWN] if isinstance(part, _WRITTEN) else _part(part)}]" for part in path)


#: Keys that are written out.
_WRITTEN = (str, int, float, complex, bytes, tuple, type(None))


def _part(part: Any) -> str:
    text = str(part) if isinstance(part, _WRITTEN) else type(part).__name__
    return text.encode(errors="backslashreplace").decode()


def path_name(path: Path, budget: ReadBudget) -> str:
    """The name of what is at a path, of any length and of whole characters."""
    name = ".".join(part if type(part) is str else _part(part) for part in path)
    budget.spend_memory(len(name) + 8 * len(path))
    return name


def join_path(path: Path, budget: ReadBudget) -> str:
    """The name of what is at a path. Raises ``CorruptCheckpointError`` where that is no name."""
    name = path_name(path, budget)
    if len(name) > LONGEST:
        raise CorruptCheckpointError(f"the name {name[:_SHOWN]!r}… has {len(name)} characters")
    try:
        return check_utf8(name, "a name")
    except ValueError as error:
        raise CorruptCheckpointError(str(error)) from error


def is_extra(key: object) -> bool:
    """Whether a part of a model's state is one that is kept as a value."""
    return isinstance(key, str) and key.endswith(_EXTRA)


def iterate_leaves(tree: Mapping[Any, Any], budget: ReadBudget, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The entries of a model's state, with their paths: all but dicts, which have entries inside."""
    for key, value in tree.items():
        budget.spend(_ENTRY + len(path))
        here = (*path, key)
        if isinstance(value, dict) and value and not is_extra(key):
            check_depth(here)
            yield from iterate_leaves(value, budget, here)
        else:
            yield here, value


def visit_tree(tree: Any, leaf: Leaf) -> None:
    """Show ``leaf`` everything in a tree that is neither plain nor a container, each once, at its first place."""
    _Visit(leaf).visit(tree, ())


class _Visit:
    def __init__(self, leaf: Leaf) -> None:
        self._leaf = leaf
        self._seen: set[int] = set()

    def visit(self, value: Any, path: Path) -> None:
        """A value and all in it."""
        kind = type(value)
        if kind in _PLAIN or id(value) in self._seen:
            return
        self._seen.add(id(value))
        check_depth(path)
        if kind in _ROWS:
            for number, item in enumerate(value):
                if type(item) not in _PLAIN:
                    self.visit(item, (*path, number))
        elif kind in _TABLES or kind is Namespace:
            for key, item in (vars(value) if kind is Namespace else value).items():
                if type(key) not in _PLAIN:
                    self.visit(key, (*path, "key"))
                if type(item) not in _PLAIN:
                    self.visit(item, (*path, key))
        else:
            self._leaf(path, value)


_ROWS = frozenset({list, tuple, set, frozenset, deque})
_TABLES = frozenset({dict, OrderedDict, Counter})


def rebuild_tree(value: Any, leaf: Leaf) -> Any:
    """A copy of a tree, with what ``leaf`` makes of everything that is neither plain nor a container.

    What is one value at several places of the tree is one in the copy.
    """
    return _Copy(leaf).copy(value, ())


class _Copy:
    """One copy of each value."""

    def __init__(self, leaf: Leaf) -> None:
        self._leaf = leaf
        self._made: dict[int, Any] = {}

    def copy(self, value: Any, path: Path) -> Any:
        """The copy of a value."""
        if type(value) in _PLAIN:
            return value
        if id(value) not in self._made:
            check_depth(path)
            self._made[id(value)] = self._new(value, path)
        return self._made[id(value)]

    def _new(self, value: Any, path: Path) -> Any:
        kind = type(value)
        if kind in _ROWS:
            items = [item if type(item) in _PLAIN else self.copy(item, (*path, i)) for i, item in enumerate(value)]
            if kind in {set, frozenset}:
                return kind(check_keys(items))
            return deque(items, value.maxlen) if kind is deque else items if kind is list else tuple(items)
        if kind in _TABLES:
            table = self._pairs(value, path)
            return table if kind is dict else kind(table)
        if kind is Namespace:
            space = Namespace()
            vars(space).update(self._pairs(vars(value), path))
            return space
        return self._leaf(path, value)

    def _pairs(self, table: Mapping[Any, Any], path: Path) -> dict[Any, Any]:
        keys = [key if type(key) in _PLAIN else self.copy(key, (*path, "key")) for key in table]
        items = [item if type(item) in _PLAIN else self.copy(item, (*path, key)) for key, item in table.items()]
        return dict(zip(check_keys(keys), items, strict=True))


def check_keys(keys: list[Any]) -> list[Any]:
    """Some keys. Raises ``CorruptCheckpointError`` for one that can be no key, and for those that would make a dict slow."""
    try:
        for key in keys:
            if type(key) not in _PLAIN:
                hash(key)
        check_hashes(keys)
    except (TypeError, ValueError) as error:
        raise CorruptCheckpointError(str(error)) from error
    return keys


def check_depth(path: Path) -> None:
    """Raise ``CorruptCheckpointError`` for what is too deep in a tree."""
    if len(path) > MAX_DEPTH:
        raise CorruptCheckpointError(
            f"its values are nested deeper than {MAX_DEPTH} levels, or inside themselves: {show_path(path[:8])}…"
        )
