"""What a pickle makes keys of dicts and sets of: each can be hashed at little cost, and they are told apart quickly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

from holdfast.ondisk.hash_limits import MOST_ALIKE, check_counts, check_hashes, count_hashes
from holdfast.ondisk.read_budget import ReadBudget

#: How deep a key may be nested, as hashing is recursive.
_DEPTH = 8

#: Types of which every value is a key that costs nothing.
_CHEAP = frozenset({str, int, float, bool, bytes, type(None), complex})

#: What hashing another object costs, such as what stands for a tensor.
_OBJECT = 16


class HashableKeys:
    """Checks the keys of the tables of one pickle before they are put in."""

    def __init__(self, budget: ReadBudget) -> None:
        self._budget = budget
        # The tables themselves are kept, so that no other one gets the id of one that is gone.
        self._counts: dict[int, tuple[Collection[Any], Counter[int]]] = {}

    def check_new(self, keys: Iterable[Any], table: Collection[Any] = ()) -> None:
        """Check keys that are to be added to a table.

        Raises ``TypeError`` for what cannot be a key, ``ValueError`` if there are too many of one hash in the table.
        """
        others = [key for key in keys if type(key) is not str]
        for key in others:
            self._check_one(key, 0)
        if len(table) + len(others) > MOST_ALIKE and others:
            self._count(others, table)

    def _check_one(self, key: Any, depth: int) -> None:
        if type(key) in _CHEAP:
            return
        if isinstance(key, tuple | frozenset) and depth < _DEPTH:
            self._budget.spend(1 + len(key))
            for part in key:
                self._check_one(part, depth + 1)
            return
        if isinstance(key, tuple | frozenset) or type(key).__hash__ is None:
            raise TypeError(f"a {type(key).__name__} is a key")
        self._budget.spend(_OBJECT)

    def _count(self, keys: Collection[Any], table: Collection[Any]) -> None:
        if not table:
            check_hashes(keys)
            return
        known = self._counts.get(id(table))
        if known is None:
            known = self._counts[id(table)] = (table, count_hashes(table))
        added = count_hashes(keys)
        counts = known[1]
        counts.update(added)
        check_counts(Counter({number: counts[number] for number in added}))
