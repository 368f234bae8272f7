"""The plain values of a checkpoint for people, in few lines, and for programs, as JSON."""

from __future__ import annotations

import math
import reprlib
from argparse import Namespace
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from holdfast.cli.placeholders import TensorPlaceholder

#: What takes lines of its own where it is long.
_DEEP = (dict, list, tuple, Namespace)

#: The longest text of one value, in characters.
_ROOM = 56

#: The most items of a list of which each takes lines of its own.
_ITEMS = 5


class _Short(reprlib.Repr):
    """``repr`` of bounded length, with the keys of a dict in their own order."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother, self.maxlong = 4, _ROOM, _ROOM, _ROOM
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdeque = 8
        self.maxdict = 1000

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        if len(x) > self.maxdict or level <= 0:
            return super().repr_dict(x, level)
        return "{" + ", ".join(f"{self.repr1(k, level - 1)}: {self.repr1(v, level - 1)}" for k, v in x.items()) + "}"

    def repr_Namespace(self, x: Namespace, level: int) -> str:  # noqa: N802 - how reprlib finds it
        return self.repr_dict(vars(x), level)


_SHORT = _Short()


def format_brief(value: Any) -> str:
    """A value on one line: what is long is cut, and the number of items said."""
    text = _SHORT.repr(value)
    if len(text) <= _ROOM and "..." not in text:
        return text
    # A range says itself how long it is, which may be more than ``len`` can.
    has_items = isinstance(value, Collection) and not isinstance(value, str | range)
    size = f" ({len(value):,} items)" if has_items else ""
    return (text if len(text) <= _ROOM else text[: _ROOM - 3] + "...") + size


def format_lines(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """A tree as ``(path, text)``: what fits on a line on one, what does not, a line for each part."""
    value = vars(value) if isinstance(value, Namespace) else value
    short = bool(path) and len(_SHORT.repr(value)) <= _ROOM
    if isinstance(value, dict) and value and not short:
        for key, item in value.items():
            yield from format_lines(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple) and not short and any(isinstance(item, _DEEP) for item in value):
        for i, item in enumerate(value[:_ITEMS]):
            yield from format_lines(item, f"{path}[{i}]")
        if len(value) > _ITEMS:
            yield f"{path}[{_ITEMS}:]", f"{len(value) - _ITEMS:,} more"
    else:
        yield path, format_brief(value)


def as_plain_value(value: Any) -> Any:
    """The nearest JSON: lists for tuples and sets, text for what JSON lacks, a description for a tensor."""
    if isinstance(value, TensorPlaceholder):
        return {"kind": value.kind, "dtype": value.info.dtype, "shape": list(value.info.shape)}
    if isinstance(value, Namespace | Mapping):
        table = vars(value) if isinstance(value, Namespace) else value
        return {str(key): as_plain_value(item) for key, item in table.items()}
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [as_plain_value(item) for item in value]
    is_json = value is None or isinstance(value, int | str) or (isinstance(value, float) and math.isfinite(value))
    return value if is_json else str(value)
