"""Checks of the keys that a pickle adds to dicts and sets: hashing each must be cheap, and few hashes may be equal.

:mod:`rankless.formats.pickles.unpickler` has one for each pickle; the opcodes ask it before they add keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

from rankless.ondisk.hash_limits import MAX_EQUAL_HASHES, check_counts, check_hashes, count_hashes
from rankless.ondisk.read_budget import ReadBudget

#: The most levels of nesting in a key, because hashing is recursive.
_DEPTH = 8

#: Types with values that are always valid keys, and cheap to hash.
_CHEAP = frozenset({str, int, float, bool, bytes, type(None), complex})

#: Units of work for hashing another object, such as a stored tensor.
_OBJECT = 16


class HashableKeys:
    """A checker of the keys of all dicts and sets of one pickle, before they are added."""

    def __init__(self, budget: ReadBudget) -> None:
        self._budget = budget
        # The tables themselves are kept alive, so that no two of them have the same id.
        self._counts: dict[int, tuple[Collection[Any], Counter[int]]] = {}

    def check_new(self, keys: Iterable[Any], table: Collection[Any] = ()) -> None:
        """Check keys that are to be added to ``table``.

        Raises ``TypeError`` for a value that cannot be a key, ``ValueError`` if too many keys have the same hash.
        """
        others = [key for key in keys if type(key) is not str]
        for key in others:
            self._check_key(key, 0)
        if len(table) + len(others) > MAX_EQUAL_HASHES and others:
            self._check_hash_counts(others, table)

    def _check_key(self, key: Any, depth: int) -> None:
        if type(key) in _CHEAP:
            return
        if isinstance(key, tuple | frozenset) and depth < _DEPTH:
            self._budget.spend(1 + len(key))
            for item in key:
                self._check_key(item, depth + 1)
            return
        if isinstance(key, tuple | frozenset) or type(key).__hash__ is None:
            raise TypeError(f"a {type(key).__name__} is used as a key, but is unhashable or nested too deeply")
        self._budget.spend(_OBJECT)

    def _check_hash_counts(self, keys: Collection[Any], table: Collection[Any]) -> None:
        if not table:
            check_hashes(keys)
            return
        entry = self._counts.get(id(table))
        if entry is None:
            entry = self._counts[id(table)] = (table, count_hashes(table))
        added = count_hashes(keys)
        _, counts = entry
        counts.update(added)
        check_counts(Counter({number: counts[number] for number in added}))
