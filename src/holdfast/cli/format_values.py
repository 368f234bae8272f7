"""Formatting of the plain values of a checkpoint: in few lines for people, and as JSON for programs."""

from __future__ import annotations

import math
import reprlib
from argparse import Namespace
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from holdfast.inspection.placeholders import TensorPlaceholder

#: Types whose items get lines of their own if the value is long.
_CONTAINERS = (dict, list, tuple, Namespace)

#: The maximum length of the text of one value, in characters.
_MAX_TEXT = 56

#: The maximum number of items of a list that get lines of their own.
_MAX_ITEMS = 5


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


def format_lines(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Iterate over a tree as ``(path, text)`` lines. A value that does not fit on one line gets a line per item."""
    value = vars(value) if isinstance(value, Namespace) else value
    short = bool(path) and len(_SHORT.repr(value)) <= _MAX_TEXT
    if isinstance(value, dict) and value and not short:
        for key, item in value.items():
            yield from format_lines(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple) and not short and any(isinstance(item, _CONTAINERS) for item in value):
        for i, item in enumerate(value[:_MAX_ITEMS]):
            yield from format_lines(item, f"{path}[{i}]")
        if len(value) > _MAX_ITEMS:
            yield f"{path}[{_MAX_ITEMS}:]", f"{len(value) - _MAX_ITEMS:,} more"
    else:
        yield path, format_brief(value)


def as_plain_value(value: Any) -> Any:
    """Return the closest JSON value: lists for tuples and sets, descriptions for tensors, text for other types."""
    if isinstance(value, TensorPlaceholder):
        return {"kind": value.kind, "dtype": value.info.dtype, "shape": list(value.info.shape)}
    if isinstance(value, Namespace | Mapping):
        table = vars(value) if isinstance(value, Namespace) else value
        return {str(key): as_plain_value(item) for key, item in table.items()}
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [as_plain_value(item) for item in value]
    is_json = value is None or isinstance(value, int | str) or (isinstance(value, float) and math.isfinite(value))
    return value if is_json else str(value)
