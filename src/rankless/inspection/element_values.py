"""The values of stored elements, as floating-point numbers. It needs no torch."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rankless.ondisk.dtypes import dtype_width

#: Elements as unsigned integers of their width: the raw bits.
Bits = npt.NDArray[Any]

#: NumPy's names of the dtypes that it has.
NUMPY_DTYPES = {
    "BOOL": "bool",
    "C64": "c8",
    "F16": "f2",
    "F32": "f4",
    "F64": "f8",
    "I16": "i2",
    "I32": "i4",
    "I64": "i8",
    "I8": "i1",
    "U16": "u2",
    "U32": "u4",
    "U64": "u8",
    "U8": "u1",
}


class _SmallFloat(NamedTuple):
    """The dtype of one byte with these bits of a fraction. ``specials`` are the codes that the formula does not give.

    A code with the sign's bit has the negative value. An exponent of 0 means a value below the normal ones.
    """

    fraction_bits: int
    bias: int
    specials: dict[int, float]


_E4M3_NANS = {0x7F: np.nan, 0xFF: np.nan}
_E5M2_SPECIALS = {
    **{code: np.nan for sign in (0, 0x80) for code in range(sign + 0x7D, sign + 0x80)},
    0x7C: np.inf,
    0xFC: -np.inf,
}
_FNUZ_NAN = {0x80: np.nan}

_SMALL_FLOATS = {
    "F8_E4M3": _SmallFloat(3, 7, _E4M3_NANS),
    "F8_E4M3FNUZ": _SmallFloat(3, 8, _FNUZ_NAN),
    "F8_E5M2": _SmallFloat(2, 15, _E5M2_SPECIALS),
    "F8_E5M2FNUZ": _SmallFloat(2, 16, _FNUZ_NAN),
}


def as_values(bits: Bits, dtype: str) -> npt.NDArray[Any]:
    """Convert elements to float64 or complex128."""
    with np.errstate(invalid="ignore"):  # NaNs that signal
        if dtype == "BF16":
            return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
        if dtype in NUMPY_DTYPES:
            return bits.view(NUMPY_DTYPES[dtype]).astype(np.complex128 if dtype == "C64" else np.float64)
    values: npt.NDArray[Any] = _values_of_bytes(dtype)[bits]
    return values


def as_array(raw: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[Any]:
    """Return the elements that some bytes are; as float32, exactly, if NumPy does not have the dtype."""
    if dtype in NUMPY_DTYPES:
        return raw.view(NUMPY_DTYPES[dtype])
    return as_values(raw.view(f"u{dtype_width(dtype)}"), dtype).astype(np.float32)


@cache
def _values_of_bytes(dtype: str) -> npt.NDArray[np.float64]:
    """Return the values of all elements of a dtype of one byte, by their bits."""
    codes = np.arange(256)
    if dtype == "F8_E8M0":  # only an exponent
        powers: npt.NDArray[np.float64] = np.append(np.exp2(codes[:-1] - 127.0), np.nan)
        return powers
    fraction_bits, bias, specials = _SMALL_FLOATS[dtype]
    magnitudes = codes & 0x7F
    exponents, fractions = magnitudes >> fraction_bits, magnitudes & ((1 << fraction_bits) - 1)
    is_normal = exponents > 0
    significands = is_normal + fractions / (1 << fraction_bits)
    values: npt.NDArray[np.float64] = np.exp2(np.maximum(exponents, 1) - float(bias)) * significands
    values[codes >= 0x80] *= -1.0  # noqa: PLR2004 - the sign's bit
    values[list(specials)] = list(specials.values())
    return values
