"""Texts of plain values on one line, of limited length.

Commands and notebooks format values with it. The order of dict keys must stay.
"""

from __future__ import annotations

import reprlib
from argparse import Namespace
from collections.abc import Collection
from typing import Any

#: The maximum length of the text of one value, in characters.
_MAX_TEXT = 56


class _Short(reprlib.Repr):
    """A ``repr`` of limited length that keeps the order of dict keys."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother, self.maxlong = 4, _MAX_TEXT, _MAX_TEXT, _MAX_TEXT
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdeque = 8
        self.maxdict = 1000

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        if len(x) > self.maxdict or level <= 0:
            return super().repr_dict(x, level)
        return "{" + ", ".join(f"{self.repr1(k, level - 1)}: {self.repr1(v, level - 1)}" for k, v in x.items()) + "}"

    def repr_Namespace(self, x: Namespace, level: int) -> str:  # noqa: N802 - reprlib looks it up by this name
        return self.repr_dict(vars(x), level)


_SHORT = _Short()


def format_brief(value: Any) -> str:
    """Return a value on one line. A long one is cut, and its number of items is added."""
    text = _SHORT.repr(value)
    if len(text) <= _MAX_TEXT and "..." not in text:
        return text
    # The ``repr`` of a range has its length, which may exceed the limit of ``len``.
    has_items = isinstance(value, Collection) and not isinstance(value, str | range)
    size = f" ({len(value):,} items)" if has_items else ""
    return (text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "...") + size


def is_brief(value: Any) -> bool:
    """Return whether a value fits on one line as it is."""
    return len(_SHORT.repr(value)) <= _MAX_TEXT
