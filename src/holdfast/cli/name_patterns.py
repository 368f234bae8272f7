"""Which tensors a pattern stands for."""

from __future__ import annotations

from fnmatch import fnmatchcase


def match_names(name: str, pattern: str | None) -> bool:
    """A glob is for the whole name, with or without its group; anything else for a part of it."""
    if pattern is None or not any(c in pattern for c in "*?["):
        return (pattern or "") in name
    return fnmatchcase(name, pattern) or fnmatchcase(name.partition("/")[2], pattern)
