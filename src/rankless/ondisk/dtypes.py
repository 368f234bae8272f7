"""The dtypes of a safetensors file: their names, here, in torch and in NumPy, and their widths.

Source: the safetensors format, https://github.com/huggingface/safetensors. The sub-byte kinds
(F4, F6) have no whole number of bytes per element and are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankless.errors import FormatError, UnsupportedTensorError

if TYPE_CHECKING:
    import numpy as np

#: Bytes per element of each dtype, by its safetensors name.
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

#: The name in torch of each dtype.
TORCH_NAMES = {
    "BOOL": "bool",
    "BF16": "bfloat16",
    "C64": "complex64",
    "F16": "float16",
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
NUMPY_NAMES = {dtype: name for dtype, name in TORCH_NAMES.items() if not (dtype == "BF16" or dtype.startswith("F8_"))}

#: Floating-point dtypes, which may be cast into each other.
FLOATING = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"})


def dtype_width(dtype: str) -> int:
    """Return the bytes per element. Raises ``FormatError`` for a name that is not in :data:`WIDTHS`."""
    try:
        return WIDTHS[dtype]
    except KeyError:
        supported = ", ".join(sorted(WIDTHS))
        raise FormatError(f"dtype {dtype!r} is not supported; rankless reads {supported}") from None


def dtype_of_array(array: np.ndarray[Any, Any]) -> str:
    """Return the dtype of an array. Raises ``UnsupportedTensorError`` if it cannot be stored."""
    if array.dtype.name not in NUMPY_NAMES.values() or not array.dtype.isnative:
        raise UnsupportedTensorError(f"a NumPy array of dtype {array.dtype}")
    return BY_TORCH_NAME[array.dtype.name]
