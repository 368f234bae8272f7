"""Limits on equal hashes among untrusted keys of dicts and sets.

Many keys of one hash make each insertion into a dict or set linear in its size: a denial-of-service attack.

Readers of pickles and values, and the check of values of a save, count with it: readers must accept all values that a
save accepts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

#: The most keys of one hash that a table may have. Ordinary tables have a few: ``-1`` and ``-2`` have the same hash.
MAX_EQUAL_HASHES = 32

#: Types that offer an attacker no way to find many values of one hash. The hashes of texts are randomised per process,
#: and at most 34 floats have the same hash.
_SAFE_TYPES = frozenset({str, bytes, float, bool, type(None)})

#: Integers below this are their own hash.
_SELF_HASH_LIMIT = 2**61 - 2


def count_hashes(keys: Iterable[Any]) -> Counter[int]:
    """Count each hash of the keys. Keys that :func:`has_safe_hash` are not counted."""
    return Counter(hash(key) for key in keys if not has_safe_hash(key))


def check_hashes(keys: Collection[Any]) -> None:
    """Raise ``ValueError`` if too many of these distinct keys have the same hash."""
    if len(keys) > MAX_EQUAL_HASHES:
        check_counts(count_hashes(keys))


def check_counts(counts: Counter[int]) -> None:
    """Raise ``ValueError`` if a hash occurs too often."""
    if counts and max(counts.values()) > MAX_EQUAL_HASHES:
        raise ValueError(f"more than {MAX_EQUAL_HASHES} of its keys have the same hash; the file may be an attack")


def has_safe_hash(key: Any) -> bool:
    """Return whether an attacker cannot find many keys of this type with one hash."""
    return type(key) in _SAFE_TYPES or (type(key) is int and -_SELF_HASH_LIMIT < key < _SELF_HASH_LIMIT)
