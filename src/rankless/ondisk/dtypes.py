"""The dtypes of a safetensors file: their names, here, in torch and in NumPy, and their widths.

Source: the safetensors format, https://github.com/huggingface/safetensors. Values of the packed dtypes, F4 and F6,
share bytes. rankless counts their bytes as elements, as torch does: in the last dimension of a shape.

Headers, values and readers use these names, also readers without torch. A name that is in files must keep its meaning
and its width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankless.errors import FormatError, UnsupportedTensorError

if TYPE_CHECKING:
    import numpy as np

#: Bytes per element of each dtype that is not packed, by its safetensors name.
WIDTHS = {
    "C64": 8,
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "BF16": 2,
    "F16": 2,
    "I16": 2,
    "U16": 2,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2": 1,
    "F8_E5M2FNUZ": 1,
    "F8_E8M0": 1,
    "I8": 1,
    "U8": 1,
}

#: The bits of a value of each packed dtype.
PACKED_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}

#: The name in torch of each dtype that it has.
TORCH_NAMES = {
    "BOOL": "bool",
    "BF16": "bfloat16",
    "C64": "complex64",
    "F16": "float16",
    "F4": "float4_e2m1fn_x2",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "I8": "int8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "U8": "uint8",
}

#: The dtype that each name in torch means.
BY_TORCH_NAME = {name: dtype for dtype, name in TORCH_NAMES.items()}

#: The name in NumPy of each dtype that it has. torch calls these by the same names.
NUMPY_NAMES = {
    dtype: name for dtype, name in TORCH_NAMES.items() if dtype != "BF16" and not dtype.startswith(("F8_", "F4"))
}

#: Floating-point dtypes, which may be cast into each other.
FLOATING = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"})

#: Floating-point dtypes with values that need no separate scale. A save may cast them.
UNSCALED_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


def dtype_width(dtype: str) -> int:
    """Return the bytes per element. Raises ``FormatError`` for an unknown name."""
    try:
        return 1 if dtype in PACKED_BITS else WIDTHS[dtype]
    except KeyError:
        supported = ", ".join(sorted({*WIDTHS, *PACKED_BITS}))
        raise FormatError(f"dtype {dtype!r} is not supported; rankless reads {supported}") from None


def count_bytes_of_rows(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in elements, given the shape in values, as in the file. They differ for packed dtypes.

    For example, ``F4`` has two values in a byte, so ``(3, 8)`` becomes ``(3, 4)``.

    Raises ``FormatError`` if rows of a packed dtype do not end with a byte.
    """
    bits = PACKED_BITS.get(dtype)
    if bits is None:
        return shape
    if not shape or shape[-1] * bits % 8:
        raise FormatError(f"rows of {dtype} {list(shape)} do not end with a byte: no library can load them")
    return (*shape[:-1], shape[-1] * bits // 8)


def count_values_of_rows(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in values, as in the file, of a shape in elements. See :func:`count_bytes_of_rows`.

    Raises ``FormatError`` if bytes of a packed dtype hold no whole number of values.
    """
    bits = PACKED_BITS.get(dtype)
    if bits is None:
        return shape
    if not shape or shape[-1] * 8 % bits:
        raise FormatError(f"the bytes of {dtype} {list(shape)} are no whole number of values")
    return (*shape[:-1], shape[-1] * 8 // bits)


def dtype_of_array(array: np.ndarray[Any, Any]) -> str:
    """Return the dtype of an array. Raises ``UnsupportedTensorError`` if it cannot be stored."""
    if array.dtype.name not in NUMPY_NAMES.values() or not array.dtype.isnative:
        raise UnsupportedTensorError(f"a NumPy array of dtype {array.dtype}")
    return BY_TORCH_NAME[array.dtype.name]
