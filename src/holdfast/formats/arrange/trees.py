"""Walking a tree that somebody else made: how deep it is, and how much one is led to do, is bounded."""

from __future__ import annotations

import datetime as dt
import pathlib
from argparse import Namespace
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from uuid import UUID

from holdfast.errors import DamagedError
from holdfast.layout.names import check_text
from holdfast.layout.values import DEPTH

#: Where a value is in a tree: keys and numbers.
Path = tuple[Any, ...]

#: What becomes of a value that is neither plain nor a container.
Leaf = Callable[[Path, Any], Any]

#: The longest name of a tensor, and the longest part of a path that is shown, in characters.
_LONGEST, _SHOWN = 4096, 60

#: What the names of extra state end with.
_EXTRA = "_extra_state"

#: So many characters of names cost as much as a step.
_CHARACTERS = 16

_PLAIN = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, UUID),
        *(dt.datetime, dt.date, dt.time, dt.timedelta, dt.timezone),
        *(pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath),
    }
)


class Budget:
    """Steps that there are for walking a tree: a few bytes of a pickle can name one list again and again."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def spend(self, steps: int = 1) -> None:
        """Raises ``DamagedError`` where there are no more."""
        self._left -= steps
        if self._left < 0:
            raise DamagedError("its values name each other again and again: there is more in them than in the file")


def show(path: Path) -> str:
    """A path for people, and the same on all ranks."""
    return ".".join(_part(part) for part in path)


def _part(part: Any) -> str:
    text = str(part) if isinstance(part, str | int | float | None) else type(part).__name__
    return text.encode(errors="backslashreplace").decode()[:_SHOWN]


def join(path: Path, budget: Budget) -> str:
    """The name of what is at a path. Raises ``DamagedError`` where that is no name."""
    name = ".".join(part if type(part) is str else _part(part) for part in path)
    budget.spend(len(name) // _CHARACTERS)
    if len(name) > _LONGEST:
        raise DamagedError(f"the name {name[:_SHOWN]!r}… has {len(name)} characters")
    try:
        return check_text(name, "a name")
    except ValueError as error:
        raise DamagedError(str(error)) from error


def is_extra(key: object) -> bool:
    """Whether a part of a model's state is one that is kept as a value."""
    return isinstance(key, str) and key.endswith(_EXTRA)


def leaves(tree: Mapping[Any, Any], budget: Budget, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The entries of a model's state, with their paths: all but dicts, which have entries inside."""
    for key, value in tree.items():
        budget.spend()
        here = (*path, key)
        if isinstance(value, dict) and value and not is_extra(key):
            _check_depth(here)
            yield from leaves(value, budget, here)
        else:
            yield here, value


def rebuilt(value: Any, leaf: Leaf, budget: Budget, path: Path = ()) -> Any:
    """A copy of a tree, with what ``leaf`` makes of everything that is neither plain nor a container."""
    budget.spend()
    _check_depth(path)
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in {list, tuple, set, frozenset}:
        return kind(rebuilt(item, leaf, budget, (*path, i)) for i, item in enumerate(value))
    if kind in {dict, OrderedDict, Counter}:
        return kind(_pairs(value, leaf, budget, path))
    if kind is deque:
        return deque((rebuilt(item, leaf, budget, (*path, i)) for i, item in enumerate(value)), value.maxlen)
    if kind is Namespace:
        space = Namespace()
        vars(space).update(_pairs(vars(value), leaf, budget, path))
        return space
    return leaf(path, value)


def _pairs(table: Mapping[Any, Any], leaf: Leaf, budget: Budget, path: Path) -> dict[Any, Any]:
    return {
        rebuilt(key, leaf, budget, (*path, "key")): rebuilt(item, leaf, budget, (*path, key))
        for key, item in table.items()
    }


def _check_depth(path: Path) -> None:
    if len(path) > DEPTH:
        raise DamagedError(f"its values are nested deeper than {DEPTH} levels, or inside themselves: {show(path[:8])}…")
