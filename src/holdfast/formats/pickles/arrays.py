"""NumPy's arrays and scalars in pickles: recorded as they are named, and made when they are asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from holdfast.formats.pickles.builtin_types import plain_record
from holdfast.formats.pickles.unpickler import AllowedCallable, OpaqueObject
from holdfast.ondisk.read_budget import ReadBudget

_DTYPE, _ARRAY, _SCALAR = "numpy.dtype", "numpy.ndarray", "numpy.generic"

#: The dtypes whose elements are plain numbers, by NumPy's codes; and those that torch has no use for.
_NAMED = {
    "b1": "bool",
    "c8": "complex64",
    "f2": "float16",
    "f4": "float32",
    "f8": "float64",
    "i1": "int8",
    "i2": "int16",
    "i4": "int32",
    "i8": "int64",
    "u1": "uint8",
    "u2": "uint16",
    "u4": "uint32",
    "u8": "uint64",
}
_UNNAMED = ("c16",)

#: The most dimensions, and sizes that none of them has.
_DIMENSIONS, _LARGEST = 64, 2**63


def _buffered(_: ReadBudget, data: Any, dtype: Any, shape: Any, order: Any) -> OpaqueObject:
    made = OpaqueObject(_ARRAY, ())
    made.state = (1, shape, dtype, order == "F", data)
    return made


#: The allow-list of NumPy's values.
NUMPY: Mapping[str, object] = {
    _DTYPE: AllowedCallable(_DTYPE, plain_record(_DTYPE)),
    _ARRAY: AllowedCallable(_ARRAY, plain_record(_ARRAY)),
    **{
        f"numpy.{core}.{name}": AllowedCallable(name, make)
        for core in ("core", "_core")
        for name, make in {
            "multiarray.scalar": plain_record(_SCALAR),
            "multiarray._reconstruct": lambda *_: OpaqueObject(_ARRAY, ()),
            "numeric._frombuffer": _buffered,
        }.items()
    },
}


def is_array(value: object) -> bool:
    """Whether it is a record of an array, a scalar or a dtype of NumPy."""
    return isinstance(value, OpaqueObject) and value.name in {_DTYPE, _ARRAY, _SCALAR}


def make_array(found: OpaqueObject) -> Any:
    """What was recorded. Raises ``ValueError`` where that is none whose elements are plain numbers."""
    import numpy as np  # noqa: PLC0415 - it takes a fifth of a second, and few checkpoints have any of it

    if found.name == _DTYPE:
        return np.dtype(_dtype(found))
    if found.name == _SCALAR:
        dtype, data = found.args
        (scalar,) = np.frombuffer(_exact(data, 1, dtype), _dtype(dtype))
        return scalar
    shape, dtype, is_fortran, data = _array(found)
    flat = np.frombuffer(data, dtype)
    return flat.reshape(shape, order="F" if is_fortran else "C").copy()


def array_nbytes(found: OpaqueObject) -> int:
    """The bytes that are copied when it is made."""
    data = found.state[-1] if isinstance(found.state, tuple) and found.state else b""
    return len(data) if isinstance(data, bytes | bytearray) else 0


def as_plain_array(found: OpaqueObject) -> tuple[str, tuple[int, ...], bytes]:
    """The name of the dtype of an array, such as ``float32``, its shape and its elements in row-major order."""
    shape, dtype, is_fortran, data = _array(found)
    name = _NAMED.get(dtype[1:])
    if name is None or dtype[0] == ">" or (is_fortran and len(shape) > 1):
        raise ValueError(f"an array of {dtype} that lies otherwise than tensors do")
    return name, shape, data


def _array(found: OpaqueObject) -> tuple[tuple[int, ...], str, bool, bytes]:
    """Shape, dtype, whether it is column-major, and the bytes."""
    if found.name != _ARRAY or not isinstance(found.state, tuple) or len(found.state) != 5:  # noqa: PLR2004 - NumPy's
        raise ValueError("an array without elements")
    _, shape, dtype, is_fortran, data = found.state
    sizes = isinstance(shape, tuple) and len(shape) <= _DIMENSIONS
    if not sizes or not all(type(size) is int and 0 <= size < _LARGEST for size in shape):
        raise ValueError("an array whose shape is none")
    return shape, _dtype(dtype), bool(is_fortran), _exact(data, math.prod(shape), dtype)


def _dtype(found: Any) -> str:
    """The name of a dtype such as ``<f8``."""
    if not isinstance(found, OpaqueObject) or found.name != _DTYPE or not found.args:
        raise ValueError("an array whose dtype is none")
    name = found.args[0]
    order = found.state[1] if isinstance(found.state, tuple) and len(found.state) > 1 else "|"
    if not isinstance(name, str):
        raise TypeError("an array whose dtype has no name")
    if name not in {*_NAMED, *_UNNAMED}:
        raise ValueError(f"an array of {name[:20]!r}, whose elements are not plain numbers")
    return f"{order if order in {'<', '>'} else '|'}{name}"


def _exact(data: Any, number: int, dtype: Any) -> bytes:
    """The bytes of so many elements."""
    if not isinstance(data, bytes | bytearray) or len(data) != number * int(_dtype(dtype)[2:]):
        raise ValueError("an array that has other bytes than its shape says")
    return bytes(data)
