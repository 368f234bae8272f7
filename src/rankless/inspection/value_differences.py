"""The comparison of plain values of two checkpoints: the paths where two trees differ.

:mod:`rankless.inspection.compare` calls it, in one process. NaN must equal NaN, and -0.0 must not equal 0.0.
"""

from __future__ import annotations

import base64
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rankless.inspection.placeholders import TensorPlaceholder
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.dtypes import WIDTHS


class _Absent:
    """A placeholder of a value that one side does not have."""

    def __repr__(self) -> str:
        return "absent"


ABSENT: Final = _Absent()

#: The key of a class name, which is ``None`` in checkpoints of systems that do not record it.
_CLASS = "class"


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """Two values that differ, or two tensors inside values, which are still to be compared."""

    path: str
    left: Any
    right: Any


def compare_values(left: Any, right: Any, path: str = "") -> Iterator[ValueDifference]:
    """Iterate over the leaves that differ, in the order of the first tree. Lists of different lengths are one leaf."""
    left, right = _as_mapping(left), _as_mapping(right)
    if isinstance(left, TensorPlaceholder) != isinstance(right, TensorPlaceholder):
        left, right = (
            _as_placeholder(left),
            _as_placeholder(right),
        )  # one format stores arrays apart, the other in the values
    if type(left) is type(right) and isinstance(left, Mapping):
        yield from _compare_members(left, right, path)
    elif type(left) is type(right) and isinstance(left, list | tuple) and len(left) == len(right):
        for number, (left_item, right_item) in enumerate(zip(left, right, strict=True)):
            yield from compare_values(left_item, right_item, f"{path}[{number}]")
    elif not _is_same(left, right):
        yield ValueDifference(path, left, right)


def _compare_members(left: Mapping[Any, Any], right: Mapping[Any, Any], path: str) -> Iterator[ValueDifference]:
    for key in dict.fromkeys([*left, *right]):
        left_item, right_item = left.get(key, ABSENT), right.get(key, ABSENT)
        unknown = key == _CLASS and (left_item is None or right_item is None)
        if not unknown:
            yield from compare_values(left_item, right_item, f"{path}.{key}" if path else str(key))


def _as_mapping(value: Any) -> Any:
    return vars(value) if isinstance(value, Namespace) else value


def _as_placeholder(value: Any) -> Any:
    """Return an array as the placeholder of an array that a checkpoint of rankless has."""
    if not _is_array(value) or not value.ndim:
        return value
    dtype = "BOOL" if value.dtype.kind == "b" else f"{value.dtype.kind.upper()}{value.dtype.itemsize * 8}"
    if dtype not in WIDTHS:
        return value
    data = value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()
    return TensorPlaceholder("array", TensorInfo(dtype, value.shape), inline=base64.b64encode(data).decode())


def _is_same(left: Any, right: Any) -> bool:
    if isinstance(left, TensorPlaceholder):
        return False
    if isinstance(left, float) and isinstance(right, float):
        return left.hex() == right.hex()  # NaN equals NaN, but -0.0 does not equal 0.0
    if type(left) is type(right) and _is_array(left):
        return bool((left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes()))
    return type(left) is type(right) and bool(left == right)


def _is_array(value: Any) -> bool:
    """Return whether a value is an array or a number of NumPy, which need not be imported for that."""
    return type(value).__module__ == "numpy" and hasattr(value, "tobytes")
