"""NumPy arrays and scalars in pickles: they are recorded while a pickle is read, and made when they are needed.

The allow-lists of torch's files have it, and :mod:`rankless.formats.tree.leaf_decoder` makes the arrays when values are
decoded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rankless.formats.pickles.builtin_types import plain_record
from rankless.formats.pickles.unpickler import AllowedCallable, OpaqueObject
from rankless.ondisk.read_budget import ReadBudget

_DTYPE, _ARRAY, _SCALAR = "numpy.dtype", "numpy.ndarray", "numpy.generic"

#: torch's names of the dtypes of plain numbers, by NumPy's codes; and the codes that torch lacks.
_TORCH_NAMES = {
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
_NUMPY_ONLY = ("c16",)

#: The most dimensions, and the limit of the size of each.
_DIMENSIONS, _LARGEST = 64, 2**63


def _record_frombuffer(_: ReadBudget, data: Any, dtype: Any, shape: Any, order: Any) -> OpaqueObject:
    record = OpaqueObject(_ARRAY, ())
    record.state = (1, shape, dtype, order == "F", data)
    return record


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
            "numeric._frombuffer": _record_frombuffer,
        }.items()
    },
}


def is_array(value: object) -> bool:
    """Return whether a value is the record of a NumPy array, scalar or dtype."""
    return isinstance(value, OpaqueObject) and value.name in {_DTYPE, _ARRAY, _SCALAR}


def make_array(record: OpaqueObject) -> Any:
    """Make the recorded array, scalar or dtype. Raises ``ValueError`` if its elements are not plain numbers."""
    import numpy as np  # noqa: PLC0415 - importing it takes 0.2 s, and few checkpoints have NumPy values

    if record.name == _DTYPE:
        return np.dtype(_dtype_code(record))
    if record.name == _SCALAR:
        dtype, data = record.args
        (scalar,) = np.frombuffer(_check_size(data, 1, dtype), _dtype_code(dtype))
        return scalar
    shape, dtype, is_fortran, data = _parse_array(record)
    flat = np.frombuffer(data, dtype)
    return flat.reshape(shape, order="F" if is_fortran else "C").copy()


def array_nbytes(record: OpaqueObject) -> int:
    """Return the size in bytes of the array that :func:`make_array` allocates."""
    data = record.state[-1] if isinstance(record.state, tuple) and record.state else b""
    return len(data) if isinstance(data, bytes | bytearray) else 0


def as_plain_array(record: OpaqueObject) -> tuple[str, tuple[int, ...], bytes]:
    """Return torch's name of an array's dtype, such as ``float32``, its shape and its elements in row-major order."""
    shape, dtype, is_fortran, data = _parse_array(record)
    name = _TORCH_NAMES.get(dtype[1:])
    if name is None or dtype[0] == ">" or (is_fortran and len(shape) > 1):
        raise ValueError(f"a NumPy array of dtype {dtype} whose memory layout differs from that of tensors")
    return name, shape, data


def _parse_array(record: OpaqueObject) -> tuple[tuple[int, ...], str, bool, bytes]:
    """Return shape, dtype, whether the elements are in column-major order, and their bytes."""
    state = record.state
    if record.name != _ARRAY or not isinstance(state, tuple) or len(state) != 5:  # noqa: PLR2004 - NumPy's
        raise ValueError("a NumPy array without elements")
    _, shape, dtype, is_fortran, data = state
    is_shape = isinstance(shape, tuple) and len(shape) <= _DIMENSIONS
    if not is_shape or not all(type(size) is int and 0 <= size < _LARGEST for size in shape):
        raise ValueError("a NumPy array with an invalid shape")
    return shape, _dtype_code(dtype), bool(is_fortran), _check_size(data, math.prod(shape), dtype)


def _dtype_code(record: Any) -> str:
    """Return NumPy's code of a dtype, such as ``<f8``."""
    if not isinstance(record, OpaqueObject) or record.name != _DTYPE or not record.args:
        raise ValueError("a NumPy array without a dtype")
    code = record.args[0]
    byte_order = record.state[1] if isinstance(record.state, tuple) and len(record.state) > 1 else "|"
    if not isinstance(code, str):
        raise TypeError("a NumPy array with an invalid dtype")
    if code not in {*_TORCH_NAMES, *_NUMPY_ONLY}:
        raise ValueError(f"a NumPy array of dtype {code[:20]!r}, whose elements are not plain numbers")
    return f"{byte_order if byte_order in {'<', '>'} else '|'}{code}"


def _check_size(data: Any, number: int, dtype: Any) -> bytes:
    """Return the bytes of ``number`` elements. Raises ``ValueError`` if there are more or fewer."""
    if not isinstance(data, bytes | bytearray) or len(data) != number * int(_dtype_code(dtype)[2:]):
        raise ValueError("a NumPy array whose bytes do not match its shape")
    return bytes(data)
