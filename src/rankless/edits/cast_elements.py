"""Casts of floating-point elements, as torch rounds them: to the nearest value, in a tie to the even one.

All NaNs become one, because torch makes different NaNs of a NaN on different processors. torch takes no part in it, so
that the bytes are the same with and without it.

:mod:`rankless.conversion.input_files` passes it to the code that streams tensors, in the threads that write. The bytes
must be equal on all processors, and equal to torch's bytes but for NaNs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from rankless.inspection.bits_to_floats import as_array, small_float_steps
from rankless.ondisk.dtypes import NUMPY_NAMES, dtype_width
from rankless.storage.aligned_memory import Bytes

#: The number of elements that are computed at a time. Threads pass the GIL to each other between operations of NumPy.
#: If each operation has few elements, that takes longer than the operation: for pieces of 2**14, two threads took twice
#: as long as one (float32 to bfloat16: 6.0 and 3.1 ns an element), with 2**17 less (1.6 and 2.1). With more, the C
#: library gives memory back and takes it anew for each result, which takes as long as the operations.
PIECE = 2**17

#: dtypes of at most this many bytes have so few codes that a table has the cast of each.
_MAX_TABLE_WIDTH = 2


def cast_elements(raw: Bytes, stored: str, dtype: str, into: Bytes) -> None:
    """Fill ``into`` with elements of ``dtype``, given the bytes of as many of ``stored``. Both are floating-point.

    As in torch, whatever is not cast to float64 is rounded to float32 first.
    """
    codes, results = raw.view(_code_type(stored)), into.view(_code_type(dtype))
    for start in range(0, len(codes), PIECE):
        piece = slice(start, start + PIECE)
        if codes.itemsize <= _MAX_TABLE_WIDTH:
            np.take(_casts_of_codes(stored, dtype), codes[piece], out=results[piece], mode="clip")
        else:
            _round_values(as_array(codes[piece].view(np.uint8), stored), dtype, results[piece])


def _code_type(dtype: str) -> np.dtype[Any]:
    return np.dtype(f"u{dtype_width(dtype)}")


@cache
def _casts_of_codes(stored: str, dtype: str) -> npt.NDArray[Any]:
    """Return the code in ``dtype`` of each code of ``stored``."""
    codes = np.arange(2 ** (8 * dtype_width(stored))).astype(_code_type(stored))
    results = np.empty(len(codes), _code_type(dtype))
    _round_values(as_array(codes.view(np.uint8), stored), dtype, results)
    return results


def _round_values(values: npt.NDArray[Any], dtype: str, into: npt.NDArray[Any]) -> None:
    """Fill ``into`` with the codes of values of NumPy's dtypes."""
    with np.errstate(over="ignore", invalid="ignore"):
        floats = _unify_nans(values.astype(np.float64 if dtype == "F64" else np.float32, copy=False))
        if dtype in NUMPY_NAMES:
            np.copyto(into.view(NUMPY_NAMES[dtype]), floats, casting="same_kind")
        elif dtype == "BF16":
            _round_to_bfloat16(floats.view(np.uint32), into)
        else:
            np.take(_codes_of_tops(dtype), _round_to_odd(floats), out=into, mode="clip")


def _unify_nans(floats: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if not np.isnan(np.max(floats, initial=0.0)):  # one pass, where a mask takes two
        return floats
    return np.where(np.isnan(floats), floats.dtype.type(np.nan), floats)


def _round_to_bfloat16(bits: npt.NDArray[np.uint32], into: npt.NDArray[np.uint16]) -> None:
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    np.copyto(into, rounded, casting="same_kind")


def _round_to_odd(floats: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return the upper halves of the elements. The last bit says whether anything was left behind.

    To round them again to three bits of a fraction, or fewer, gives the same as to round the elements.
    """
    bits = floats.view(np.uint32)
    tops = (bits >> np.uint32(16)).astype(np.uint16)
    tops |= (bits & np.uint32(0xFFFF)) != 0
    return tops


@cache
def _codes_of_tops(dtype: str) -> npt.NDArray[np.uint8]:
    """Return the code of a dtype of one byte for each float32 with a lower half of 0, by its upper half."""
    bits = np.arange(2**16, dtype=np.uint32) << np.uint32(16)
    return _exponent_codes(bits) if dtype == "F8_E8M0" else _small_float_codes(bits, dtype)


def _exponent_codes(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
    """Return the exponents, rounded by the fraction. Infinities and NaNs become the NaN. There are no signs."""
    exponents, fractions = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    is_up = (fractions > 0x400000) | ((fractions == 0x400000) & (exponents > 0))  # noqa: PLR2004 - one half
    return np.where(exponents == 0xFF, 0xFF, exponents + is_up).astype(np.uint8)  # noqa: PLR2004


def _small_float_codes(bits: npt.NDArray[np.uint32], dtype: str) -> npt.NDArray[np.uint8]:
    steps = small_float_steps(dtype)
    magnitudes = np.abs(bits.view(np.float32).astype(np.float64))
    middles = (steps.values[1:] + steps.values[:-1]) / 2
    codes = np.searchsorted(middles, magnitudes)
    is_tie = np.append(middles, np.inf)[codes] == magnitudes
    codes = np.minimum(codes + (is_tie & (codes % 2 == 1)), len(middles))
    codes = np.where(np.isnan(magnitudes), steps.nan, codes)
    is_signed = (bits >> 31 == 1) & ((codes > 0) | steps.has_negative_zero)
    return (codes | np.where(is_signed, 0x80, 0)).astype(np.uint8)
