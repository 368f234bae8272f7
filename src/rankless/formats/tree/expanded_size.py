"""The expanded size of a tree: a value that is referenced several times counts several times.

A pickle can reference one value many times, and walking, comparing or printing the tree visits it as often. For
example, 40 lists that each have the next one twice expand to more than 2**40 values. So this size is charged to the
budget before the tree is walked. Computing it examines each value once.

:mod:`rankless.formats.tree.tree_contents` and readers of other systems call it before they walk an unpickled tree.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from itertools import chain
from typing import Any

from rankless.errors import CorruptCheckpointError
from rankless.formats.pickles.unpickler import OpaqueObject
from rankless.ondisk.read_budget import ReadBudget
from rankless.ondisk.values import MAX_DEPTH

#: Levels of nesting above the values, in addition to those that values may have.
_ABOVE = 8

#: A limit that is larger than any number of levels.
_LEVELS = 2**10

#: Units of work for a container, in addition to those for its items.
_CONTAINER = 2

_LEAVES = frozenset({str, int, float, bool, type(None), bytes})
_ROWS = frozenset({list, tuple, set, frozenset, deque})
_TABLES = frozenset({dict, OrderedDict, Counter})


def check_expanded_size(tree: Any, budget: ReadBudget) -> None:
    """Charge the units for walking a tree to the budget.

    Raises ``CorruptCheckpointError`` if the tree is nested too deeply or contains itself.
    """
    units, _ = _SizeCounter(budget).measure_value(tree, 0)
    budget.spend(units)


class _SizeCounter:
    def __init__(self, budget: ReadBudget) -> None:
        self._budget = budget
        self._sizes: dict[int, int] = {}

    def measure_value(self, value: Any, depth: int) -> tuple[int, int]:
        """Return the units for a value, and its levels of nesting."""
        items = _list_inner_values(value)
        if items is None:
            return 1, 0
        if not items:
            return _CONTAINER, 0
        if depth > MAX_DEPTH + _ABOVE:
            raise CorruptCheckpointError(f"its values are nested deeper than {MAX_DEPTH} levels, or inside themselves")
        size = self._sizes.get(id(value))
        if size is None:
            units, levels = self._measure_items(items, depth)
            self._sizes[id(value)] = units * _LEVELS + levels  # one number, because there may be many containers
            return units, levels
        units, levels = divmod(size, _LEVELS)
        if depth + levels > MAX_DEPTH + _ABOVE:
            raise CorruptCheckpointError(f"its values are nested deeper than {MAX_DEPTH} levels, or inside themselves")
        return units, levels

    def _measure_items(self, items: Iterable[Any], depth: int) -> tuple[int, int]:
        units, levels = _CONTAINER, 0
        for item in items:
            if type(item) in _LEAVES:
                units += 1
                continue
            item_units, item_levels = self.measure_value(item, depth + 1)
            units += item_units
            levels = max(levels, item_levels + 1)
            if units > self._budget.left:  # stop here, because these numbers can grow exponentially
                self._budget.spend(units)
        return units, levels


def _list_inner_values(value: Any) -> Iterable[Any] | None:
    """Return the items of a container, or ``None`` for any other value."""
    kind = type(value)
    if kind in _ROWS or isinstance(value, tuple):
        return value  # type: ignore[no-any-return]
    if kind in _TABLES:
        return chain(value, value.values()) if value else ()
    if kind is OpaqueObject:
        return (value.args, value.state)
    if kind is Namespace:
        return (vars(value),)
    return None
