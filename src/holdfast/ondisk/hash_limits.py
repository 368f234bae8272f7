"""Keys of dicts and sets that somebody else chose: too many of one hash make a dict so slow that they are an attack."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

#: How many keys of one hash a table may have. Honest ones have a few: ``-1`` and ``-2`` have the same hash.
MOST_ALIKE = 32

#: Types of which nobody can find many values of one hash: texts have hashes that differ from process to process, and
#: of floats there are at most 34.
_SAFE = frozenset({str, bytes, float, bool, type(None)})

#: Integers below this are their own hash.
_OWN_HASH = 2**61 - 2


def count_hashes(keys: Iterable[Any]) -> Counter[int]:
    """How often each hash is there, among keys whose hashes can be chosen."""
    return Counter(hash(key) for key in keys if not is_safe(key))


def check_hashes(keys: Collection[Any]) -> None:
    """Raise ``ValueError`` if many of some distinct keys have one hash."""
    if len(keys) > MOST_ALIKE:
        check_counts(count_hashes(keys))


def check_counts(counts: Counter[int]) -> None:
    """Raise ``ValueError`` if a hash is there too often."""
    if counts and max(counts.values()) > MOST_ALIKE:
        raise ValueError(f"more than {MOST_ALIKE} of its keys have the same hash, as no honest ones do")


def is_safe(key: Any) -> bool:
    """Whether nobody can find many such keys of one hash."""
    return type(key) in _SAFE or (type(key) is int and -_OWN_HASH < key < _OWN_HASH)
