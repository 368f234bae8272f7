"""The dtypes of a safetensors file: their names and widths.

Source: the safetensors format, https://github.com/huggingface/safetensors. The sub-byte kinds
(F4, F6) have no whole number of bytes per element and are left out.
"""

from __future__ import annotations

from rankless.errors import FormatError

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

#: Floating-point dtypes, which may be cast into each other.
FLOATING = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"})


def dtype_width(dtype: str) -> int:
    """Return the bytes per element. Raises ``FormatError`` for a name that is not in :data:`WIDTHS`."""
    try:
        return WIDTHS[dtype]
    except KeyError:
        supported = ", ".join(sorted(WIDTHS))
        raise FormatError(f"dtype {dtype!r} is not supported; rankless reads {supported}") from None
