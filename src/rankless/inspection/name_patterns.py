"""The patterns that select tensors by name.

Commands, statistics and comparisons select with it.
"""

from __future__ import annotations

from fnmatch import fnmatchcase


def match_names(name: str, pattern: str | None) -> bool:
    """Return whether a tensor name matches.

    A glob must match the whole name, with or without its group. Other patterns match any part of the name. For example,
    ``layers.*`` and ``model/layers.*`` match ``model/layers.0.weight``, and so does ``0.weight``.
    """
    if pattern is None or not any(c in pattern for c in "*?["):
        return (pattern or "") in name
    return fnmatchcase(name, pattern) or fnmatchcase(name.partition("/")[2], pattern)
