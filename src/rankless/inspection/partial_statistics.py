"""The numerics of statistics: of a part of a tensor, and of merged parts. Pure functions of arrays.

Elements are added in a fixed order, so that statistics do not depend on ranks, threads, or how files were read:

1. A tensor is cut into parts of 2^17 elements. Elements that are not finite are left out. NumPy adds up the elements of
   a part as float64, pairwise, and then the squares of their distances from their mean.
2. The parts of each 2^19 elements are merged one after the other, and then these, by the rule of Chan, Golub and
   LeVeque. It needs no second pass over the elements, and does not cancel where the mean is large.
3. Of 2^19 elements, or the remaining ones, that have one or two bytes and are at least as many as there are values of
   their dtype, the different values are added up in the order of their bits, each times the number of its elements.

Counts are exact.

All of it lets the other threads of the process run, threads of a training, too. An operation should be long enough that
another thread can wake up meanwhile, and its numbers should fit into the processor's second cache: hence 2^17.

:mod:`rankless.inspection.measured_tensors` calls it in its threads. Sizes and order of the parts decide the last bits
of numbers that are stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import numpy.typing as npt

from rankless.inspection.bits_to_floats import Bits, as_values
from rankless.inspection.tensor_statistics import BUCKETS, EXPONENTS, ZERO_BUCKET, TensorStatistics
from rankless.ondisk.dtypes import dtype_width
from rankless.storage.aligned_memory import aligned_buffer

#: The number of elements that are added up at a time.
_PART = 2**17

#: The most bytes of an element that is looked up in a table, and the most elements that are counted at a time.
_TABLE_BYTES, _COUNTED = 2, 2**19

#: The bits of the fraction of float64, the number of its exponents, and the one of 1.0.
_FRACTION_BITS, _EXPONENTS, _BIAS = 52, 2**11, 1023

#: NumPy's names of the dtypes of larger elements.
_NUMPY_DTYPES = {"F32": "f4", "F64": "f8", "I32": "i4", "I64": "i8", "U32": "u4", "U64": "u8"}

Codes = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class PartialStatistics:
    """The statistics of a part of a tensor. ``deviation`` is the sum of the squared distances from its mean."""

    elements: int = 0
    nans: int = 0
    positive_infinities: int = 0
    negative_infinities: int = 0
    finite: int = 0
    minimum: float = math.inf
    maximum: float = -math.inf
    total: float = 0.0
    deviation: float = 0.0
    histogram: Counts = field(default_factory=lambda: np.zeros(BUCKETS, np.int64))

    def merge(self, following: PartialStatistics) -> None:
        """Add the statistics of the part that follows."""
        self.elements += following.elements
        self.nans += following.nans
        self.positive_infinities += following.positive_infinities
        self.negative_infinities += following.negative_infinities
        self.histogram += following.histogram
        self._merge_moments(following)

    def _merge_moments(self, following: PartialStatistics) -> None:
        if not following.finite:
            return
        finite = self.finite + following.finite
        if self.finite:
            distance = following.total / following.finite - self.total / self.finite
            self.deviation += following.deviation + distance * distance * (self.finite / finite) * following.finite
        else:
            self.deviation = following.deviation
        self.finite, self.total = finite, self.total + following.total
        self.minimum = min(self.minimum, following.minimum)
        self.maximum = max(self.maximum, following.maximum)

    def _norm(self, mean: float | None) -> float | None:
        """Return the norm. An empty tensor has the norm 0; one with only NaN or infinite elements has none."""
        if mean is None:
            return None if self.elements else 0.0
        return math.sqrt(self.deviation + self.finite * mean * mean)

    def summarize(self) -> TensorStatistics:
        """Return the statistics of the tensor that consists of the merged parts."""
        mean = self.total / self.finite if self.finite else None
        return TensorStatistics(
            elements=self.elements,
            nans=self.nans,
            positive_infinities=self.positive_infinities,
            negative_infinities=self.negative_infinities,
            zeros=int(self.histogram[ZERO_BUCKET]),
            minimum=self.minimum if self.finite else None,
            maximum=self.maximum if self.finite else None,
            mean=mean,
            norm=self._norm(mean),
            std=math.sqrt(self.deviation / self.finite) if self.finite else None,
            histogram=tuple(self.histogram.tolist()),
        )


class Scratch:
    """Memory for the computation on a part. New memory would cost more time than the computation."""

    def __init__(self) -> None:
        #: Numbers that are counted. Elsewhere in the same memory are the elements of a part as float64.
        self.codes = aligned_buffer(_COUNTED * np.dtype(np.int64).itemsize).view(np.int64)
        floats = self.codes.view(np.float64)
        self.values, self.distances = floats[_PART : 2 * _PART], floats[:_PART]


def measure_part(bits: Bits, dtype: str, scratch: Scratch) -> PartialStatistics:
    """Return the statistics of at most 2^19 consecutive elements of one tensor, which begin at a multiple of these."""
    if bits.itemsize <= _TABLE_BYTES and len(bits) >= len(_value_table(dtype)):
        return _measure_by_value(bits, dtype, scratch)
    if dtype == "C64":
        bits, dtype = bits.view(np.uint32), "F32"
    merged = PartialStatistics()
    for start in range(0, len(bits), _PART):
        part = bits[start : start + _PART]
        values = scratch.values[: len(part)]
        if bits.itemsize <= _TABLE_BYTES:
            np.take(_value_table(dtype), part, out=values, mode="clip")
        else:
            with np.errstate(invalid="ignore"):  # NaNs that signal
                np.copyto(values, part.view(_NUMPY_DTYPES[dtype]))
        merged.merge(_measure_values(values, scratch))
    return merged


def _measure_by_value(bits: Bits, dtype: str, scratch: Scratch) -> PartialStatistics:
    """Count the elements of each value. That is faster than to convert them, if they are many."""
    table, codes = _value_table(dtype), scratch.codes[: len(bits)]
    np.copyto(codes, bits)
    counts = _count_codes(codes, len(table))
    used = np.flatnonzero(counts)
    return _measure_counts(table[used], counts[used])


@cache
def _value_table(dtype: str) -> Floats:
    """Return the values of all elements of a dtype, by their bits."""
    width = dtype_width(dtype)
    values: Floats = as_values(np.arange(2 ** (8 * width), dtype=f"u{width}"), dtype)
    return values


def _count_codes(codes: Codes, size: int) -> Counts:
    """Return how often each number below ``size`` occurs. Other threads run meanwhile."""
    counts: Counts = np.bincount(codes, minlength=size)
    return counts


def _measure_counts(values: Floats, counts: Counts) -> PartialStatistics:
    """Return the statistics of different values. Each occurs ``counts`` times."""
    part = PartialStatistics(
        elements=int(counts.sum()),
        nans=int(counts[np.isnan(values)].sum()),
        positive_infinities=int(counts[values == np.inf].sum()),
        negative_infinities=int(counts[values == -np.inf].sum()),
    )
    is_finite = np.isfinite(values)
    values, counts = values[is_finite], counts[is_finite]
    if len(values):
        by_exponent = np.zeros(2 * _EXPONENTS, np.int64)
        np.add.at(by_exponent, values.view(np.uint64) >> np.uint64(_FRACTION_BITS), counts)
        part.histogram = _fold_counts(by_exponent, counts[values == 0], values[values == 0])
        part.finite, part.total = int(counts.sum()), float(np.add.reduce(values * counts))
        part.minimum, part.maximum = float(values.min()) + 0.0, float(values.max()) + 0.0
        part.deviation = float(np.add.reduce(np.square(values - part.total / part.finite) * counts))
    return part


def _measure_values(values: Floats, scratch: Scratch) -> PartialStatistics:
    """Return the statistics of the values of a part, which are in ``scratch``."""
    part, codes = PartialStatistics(len(values)), scratch.codes[: len(values)]
    np.right_shift(values.view(np.uint64), np.uint64(_FRACTION_BITS), out=codes.view(np.uint64))
    by_exponent = _count_codes(codes, 2 * _EXPONENTS)
    if by_exponent[_EXPONENTS - 1] or by_exponent[-1]:
        part.nans = int(np.count_nonzero(np.isnan(values)))
        part.positive_infinities = int(np.count_nonzero(values == np.inf))
        part.negative_infinities = int(np.count_nonzero(values == -np.inf))
        values = values[np.isfinite(values)]
    has_zeros = by_exponent[0] or by_exponent[_EXPONENTS]  # or float64 that is nearly zero
    zeros = values[values == 0] if has_zeros else values[:0]
    part.histogram = _fold_counts(by_exponent, np.ones(len(zeros), np.int64), zeros)
    if len(values):
        _measure_moments(values, scratch.distances[: len(values)], part)
    return part


def _measure_moments(values: Floats, distances: Floats, part: PartialStatistics) -> None:
    """Add the range and the moments of finite values. ``distances`` is memory of the same size."""
    # -0.0 + 0.0 is 0.0: which of two equal zeros is the smaller one depends on the processor.
    part.minimum, part.maximum = float(values.min()) + 0.0, float(values.max()) + 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        part.finite, part.total = len(values), float(np.add.reduce(values))
        np.subtract(values, part.total / part.finite, out=distances)
        part.deviation = float(np.add.reduce(np.square(distances, out=distances)))


def _fold_counts(by_exponent: Counts, zero_counts: Counts, zeros: Floats) -> Counts:
    """Return the histogram of finite values by sign and exponent, among them ``zeros``."""
    is_negative = np.signbit(zeros)
    by_exponent[0] -= zero_counts[~is_negative].sum()
    by_exponent[_EXPONENTS] -= zero_counts[is_negative].sum()
    positive, negative = by_exponent[:_EXPONENTS], by_exponent[_EXPONENTS:]
    return np.concatenate([_fold_sign(negative)[::-1], [zero_counts.sum()], _fold_sign(positive)])


def _fold_sign(by_exponent: Counts) -> Counts:
    first, last = _BIAS + EXPONENTS[0] + 1, _BIAS + EXPONENTS[-1]
    folded = by_exponent[first - 1 : last + 1].copy()
    folded[0], folded[-1] = by_exponent[:first].sum(), by_exponent[last : _EXPONENTS - 1].sum()
    return folded
