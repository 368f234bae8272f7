"""Which plain values of two checkpoints differ. Two trees are walked together, and each difference has its path."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from holdfast.cli.placeholders import TensorPlaceholder


class _Absent:
    """Stands for a value that one side does not have."""

    def __repr__(self) -> str:
        return "absent"


ABSENT: Final = _Absent()

#: What a class is called where nobody kept it: checkpoints of other systems do not say.
_CLASS = "class"


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """Two values that are not the same, or two tensors inside values, which are yet to be compared."""

    path: str
    left: Any
    right: Any


def compare_values(left: Any, right: Any, path: str = "") -> Iterator[ValueDifference]:
    """The leaves that differ, in the order of the first tree; lists of different lengths are one leaf."""
    left, right = _opened(left), _opened(right)
    if type(left) is type(right) and isinstance(left, Mapping):
        yield from _members(left, right, path)
    elif type(left) is type(right) and isinstance(left, list | tuple) and len(left) == len(right):
        for number, (one, other) in enumerate(zip(left, right, strict=True)):
            yield from compare_values(one, other, f"{path}[{number}]")
    elif not _same(left, right):
        yield ValueDifference(path, left, right)


def _members(left: Mapping[Any, Any], right: Mapping[Any, Any], path: str) -> Iterator[ValueDifference]:
    for key in dict.fromkeys([*left, *right]):
        one, other = left.get(key, ABSENT), right.get(key, ABSENT)
        unknown = key == _CLASS and (one is None or other is None)
        if not unknown:
            yield from compare_values(one, other, f"{path}.{key}" if path else str(key))


def _opened(value: Any) -> Any:
    return vars(value) if isinstance(value, Namespace) else value


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, TensorPlaceholder):
        return False
    if isinstance(left, float) and isinstance(right, float):
        return left.hex() == right.hex()  # nan is nan, and -0.0 is not 0.0
    return type(left) is type(right) and bool(left == right)
