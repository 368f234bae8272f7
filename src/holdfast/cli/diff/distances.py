"""By how much elements of two tensors differ, many tensors in one pass. Pure functions of arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from holdfast.state.tensors import DTYPES

#: Elements as unsigned integers of their width: the bits, whatever they mean.
Bits = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]


class ChangeMetrics(NamedTuple):
    """For each of several tensors: how many elements differ, and the largest differences among them.

    Elements differ where their bits do; with different dtypes, where their values do. The absolute difference is
    ``|a - b|``, the relative one ``|a - b| / max(|a|, |b|)``; both are infinite where one is no number, or infinite.
    """

    differing: npt.NDArray[np.int64]
    absolute: Floats
    relative: Floats


def measure_change(left: Bits, right: Bits, dtypes: tuple[str, str], starts: npt.NDArray[np.int64]) -> ChangeMetrics:
    """How elements differ, of tensors that begin at ``starts``: ascending, no two alike, the first 0."""
    differ = left != right if dtypes[0] == dtypes[1] else _count_unequal(left, right, dtypes)
    counts = np.add.reduceat(differ, starts, dtype=np.int64)
    where = np.flatnonzero(differ)
    absolute, relative = np.zeros((2, len(left)))
    if len(where):
        absolute[where], relative[where] = _measure_distances(left[where], right[where], dtypes)
    return ChangeMetrics(counts, np.maximum.reduceat(absolute, starts), np.maximum.reduceat(relative, starts))


def _count_unequal(left: Bits, right: Bits, dtypes: tuple[str, str]) -> npt.NDArray[np.bool_]:
    one, other = (_as_values(bits, dtype) for bits, dtype in zip((left, right), dtypes, strict=True))
    differ: npt.NDArray[np.bool_] = (one != other) & ~(np.isnan(one) & np.isnan(other))
    return differ


def _measure_distances(left: Bits, right: Bits, dtypes: tuple[str, str]) -> tuple[Floats, Floats]:
    one, other = (_as_values(bits, dtype) for bits, dtype in zip((left, right), dtypes, strict=True))
    with np.errstate(all="ignore"):
        exact = dtypes[0] == dtypes[1] and dtypes[0][0] in "IU"
        absolute = _distance_between(left, right, dtypes[0]) if exact else np.abs(one - other)
        absolute[np.isnan(absolute)] = np.inf
        absolute[np.isnan(one) & np.isnan(other)] = 0.0
        relative = absolute / np.maximum(np.abs(one), np.abs(other))
    relative[absolute == 0.0] = 0.0
    relative[np.isinf(absolute)] = np.inf
    return absolute, relative


def _distance_between(left: Bits, right: Bits, dtype: str) -> Floats:
    """How far integers are apart. As floats they could be next to each other and look alike."""
    integers = f"{'i' if dtype[0] == 'I' else 'u'}{left.itemsize}"
    one, other = left.view(integers), right.view(integers)
    apart = np.maximum(one, other).view(left.dtype) - np.minimum(one, other).view(left.dtype)
    return np.asarray(apart, np.float64)


def _as_values(bits: Bits, dtype: str) -> npt.NDArray[Any]:
    """Elements as 64-bit floats, or as complex numbers of two."""
    tensor = torch.from_numpy(bits.view(np.uint8)).view(DTYPES[dtype])
    values: npt.NDArray[Any] = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).numpy()
    return values
