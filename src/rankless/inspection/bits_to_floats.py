"""The values of stored elements, as floating-point numbers. It needs no torch.

Statistics, comparisons, casts of conversions and views of checkpoints convert with it, in any thread. The values must
be exact.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rankless.ondisk.dtypes import NUMPY_NAMES, PACKED_BITS, dtype_width

#: Elements as unsigned integers of their width: the raw bits.
Bits = npt.NDArray[Any]


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
    """Convert elements to float64 or complex128. Of packed dtypes these are the numbers in the bytes."""
    if dtype in PACKED_BITS:
        return bits.astype(np.float64)
    with np.errstate(invalid="ignore"):  # NaNs that signal
        if dtype == "BF16":
            return _widen_bfloat16(bits).astype(np.float64)
        if dtype in NUMPY_NAMES:
            return bits.view(NUMPY_NAMES[dtype]).astype(np.complex128 if dtype == "C64" else np.float64)
    values: npt.NDArray[Any] = _values_of_bytes(dtype)[bits]
    return values


def as_array(raw: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[Any]:
    """Return the elements that some bytes are; as float32, exactly, if NumPy does not have the dtype.

    Elements of packed dtypes are bytes.
    """
    if dtype in NUMPY_NAMES:
        return raw.view(NUMPY_NAMES[dtype])
    if dtype in PACKED_BITS:
        return raw
    bits = raw.view(f"u{dtype_width(dtype)}")
    return _widen_bfloat16(bits) if dtype == "BF16" else as_values(bits, dtype).astype(np.float32)


def _widen_bfloat16(bits: Bits) -> npt.NDArray[np.float32]:
    widened = bits.astype(np.uint32)
    widened <<= np.uint32(16)
    return widened.view(np.float32)


@cache
def _values_of_bytes(dtype: str) -> npt.NDArray[np.float64]:
    """Return the values of all elements of a dtype of one byte, by their bits."""
    codes = np.arange(256)
    if dtype == "F8_E8M0":  # only an exponent
        powers: npt.NDArray[np.float64] = np.append(np.exp2(codes[:-1] - 127.0), np.nan)
        return powers
    values = _formula_values(dtype, codes & 0x7F)
    values[codes >= 0x80] *= -1.0  # noqa: PLR2004 - the sign's bit
    specials = _SMALL_FLOATS[dtype].specials
    values[list(specials)] = list(specials.values())
    return values


def _formula_values(dtype: str, magnitudes: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the values of codes without signs and specials."""
    fraction_bits, bias, _ = _SMALL_FLOATS[dtype]
    exponents, fractions = magnitudes >> fraction_bits, magnitudes & ((1 << fraction_bits) - 1)
    significands = (exponents > 0) + fractions / (1 << fraction_bits)
    values: npt.NDArray[np.float64] = np.exp2(np.maximum(exponents, 1) - float(bias)) * significands
    return values


class SmallFloatSteps(NamedTuple):
    """The values that elements are rounded to, by their codes. ``nan`` is the code of NaNs.

    The last value is too large for the dtype: its code stands for infinity, or for a NaN. F8_E4M3 has none: torch makes
    all that is too large the largest value.
    """

    values: npt.NDArray[np.float64]
    nan: int
    has_negative_zero: bool


def small_float_steps(dtype: str) -> SmallFloatSteps:
    """Return the values that elements of a dtype of one byte with a sign are rounded to."""
    specials = _SMALL_FLOATS[dtype].specials
    is_unsigned_zero = min(specials) == 0x80  # noqa: PLR2004 - the sign's bit
    steps = np.arange(min(specials) + (dtype != "F8_E4M3"))  # which saturates
    return SmallFloatSteps(_formula_values(dtype, steps), 0x80 if is_unsigned_zero else 0x7F, not is_unsigned_zero)
