"""How large a tree is if every value counts as often as it is there. Asked before anybody walks it.

A pickle can name one value many times. Whoever walks, compares or prints such a tree passes it as often, so all of that
is paid for here, once, by looking at each value once.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from itertools import chain
from typing import Any

from holdfast.errors import CorruptCheckpointError
from holdfast.formats.pickles.unpickler import OpaqueObject
from holdfast.ondisk.read_budget import ReadBudget
from holdfast.ondisk.values import MAX_DEPTH

#: Levels that may be above the values, beside those that they may have themselves.
_ABOVE = 8

#: More than the levels that there are.
_LEVELS = 2**10

#: Steps for a container, beside those for what is in it.
_CONTAINER = 2

_LEAVES = frozenset({str, int, float, bool, type(None), bytes})
_ROWS = frozenset({list, tuple, set, frozenset, deque})
_TABLES = frozenset({dict, OrderedDict, Counter})


def check_expanded_size(tree: Any, budget: ReadBudget) -> None:
    """Spend what it takes to walk a tree. Raises ``CorruptCheckpointError`` for one that is too deep or inside itself."""
    steps, _ = _Scales(budget).weigh(tree, 0)
    budget.spend(steps)


class _Scales:
    def __init__(self, budget: ReadBudget) -> None:
        self._budget = budget
        self._known: dict[int, int] = {}

    def weigh(self, value: Any, depth: int) -> tuple[int, int]:
        """The steps and the levels of a value."""
        inside = _inside(value)
        if inside is None:
            return 1, 0
        if not inside:
            return _CONTAINER, 0
        if depth > MAX_DEPTH + _ABOVE:
            raise CorruptCheckpointError(f"its values are nested deeper than {MAX_DEPTH} levels, or inside themselves")
        known = self._known.get(id(value))
        if known is None:
            steps, levels = self._sum(inside, depth)
            self._known[id(value)] = steps * _LEVELS + levels  # one number, as there may be many containers
            return steps, levels
        steps, levels = divmod(known, _LEVELS)
        if depth + levels > MAX_DEPTH + _ABOVE:
            raise CorruptCheckpointError(f"its values are nested deeper than {MAX_DEPTH} levels, or inside themselves")
        return steps, levels

    def _sum(self, items: Iterable[Any], depth: int) -> tuple[int, int]:
        steps, levels = _CONTAINER, 0
        for item in items:
            if type(item) in _LEAVES:
                steps += 1
                continue
            more, below = self.weigh(item, depth + 1)
            steps += more
            levels = max(levels, below + 1)
            if steps > self._budget.left:  # at once, as these numbers may grow without end
                self._budget.spend(steps)
        return steps, levels


def _inside(value: Any) -> Iterable[Any] | None:
    """What is in a container; ``None`` for anything else."""
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
