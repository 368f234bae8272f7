"""Differences of elements of two sets of tensors, computed in one pass. Pure functions of arrays.

:mod:`rankless.inspection.tensor_differences` calls it in its threads, for ``rankless diff`` and ``report``; it takes
the columns of :class:`ChangeMetrics` by their order. Elements of equal dtypes are compared by their bits: as floats,
large neighbouring integers would be equal.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rankless.inspection.bits_to_floats import Bits, as_values

Floats = npt.NDArray[np.float64]


class ChangeMetrics(NamedTuple):
    """The number of differing elements and the largest differences, for each of several tensors.

    Elements are compared by their bits or, with different dtypes, by their values. The absolute difference is
    ``|a - b|``, and the relative one ``|a - b| / max(|a|, |b|)``. Both are infinite if one value is NaN or infinite.
    """

    differing: npt.NDArray[np.int64]
    absolute: Floats
    relative: Floats


def measure_change(left: Bits, right: Bits, dtypes: tuple[str, str], starts: npt.NDArray[np.int64]) -> ChangeMetrics:
    """Compare the elements of tensors that begin at ``starts``, which is strictly ascending and begins with 0."""
    differ = left != right if dtypes[0] == dtypes[1] else _differ_by_value(left, right, dtypes)
    counts = np.add.reduceat(differ, starts, dtype=np.int64)
    indices = np.flatnonzero(differ)
    absolute, relative = np.zeros((2, len(left)))
    if len(indices):
        absolute[indices], relative[indices] = _measure_distances(left[indices], right[indices], dtypes)
    return ChangeMetrics(counts, np.maximum.reduceat(absolute, starts), np.maximum.reduceat(relative, starts))


def _differ_by_value(left: Bits, right: Bits, dtypes: tuple[str, str]) -> npt.NDArray[np.bool_]:
    left_values, right_values = (as_values(bits, dtype) for bits, dtype in zip((left, right), dtypes, strict=True))
    differ: npt.NDArray[np.bool_] = (left_values != right_values) & ~(np.isnan(left_values) & np.isnan(right_values))
    return differ


def _measure_distances(left: Bits, right: Bits, dtypes: tuple[str, str]) -> tuple[Floats, Floats]:
    left_values, right_values = (as_values(bits, dtype) for bits, dtype in zip((left, right), dtypes, strict=True))
    with np.errstate(all="ignore"):
        exact = dtypes[0] == dtypes[1] and dtypes[0][0] in "IU"
        absolute = _integer_distances(left, right, dtypes[0]) if exact else np.abs(left_values - right_values)
        absolute[np.isnan(absolute)] = np.inf
        absolute[np.isnan(left_values) & np.isnan(right_values)] = 0.0
        relative = absolute / np.maximum(np.abs(left_values), np.abs(right_values))
    relative[absolute == 0.0] = 0.0
    relative[np.isinf(absolute)] = np.inf
    return absolute, relative


def _integer_distances(left: Bits, right: Bits, dtype: str) -> Floats:
    """Return the distances of integers. As floats, neighbouring large integers would be equal."""
    integers = f"{'i' if dtype[0] == 'I' else 'u'}{left.itemsize}"
    left_integers, right_integers = left.view(integers), right.view(integers)
    larger, smaller = np.maximum(left_integers, right_integers), np.minimum(left_integers, right_integers)
    return np.asarray(larger.view(left.dtype) - smaller.view(left.dtype), np.float64)
