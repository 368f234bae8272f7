"""The numerics of statistics: those of a part of a tensor, and how parts are merged. Pure functions of arrays.

Elements are added in a fixed order, so that statistics do not depend on ranks, threads, or how files were read:

1. A tensor is cut into parts of 2^17 elements. Elements that are not finite are left out. NumPy adds up the elements of
   a part as float64, pairwise, and then the squares of their distances from their mean.
2. The parts of each 2^19 elements are merged one after the other, and then these, by the rule of Chan, Golub and
   LeVeque. It needs no second pass over the elements, and does not cancel where the mean is large.
3. If an element has one byte, a part has 2^19 elements: its different values are added up in the order of their bits,
   each times the number of its elements.

Counts are exact.

All of it lets the other threads of the process run, those of a training, too. An operation should be long enough that
another thread can wake up meanwhile, and its numbers should fit into the processor's second cache: hence 2^17.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from holdfast.inspection.element_values import Bits, as_values
from holdfast.inspection.tensor_statistics import BUCKETS, EXPONENTS, ZERO_BUCKET, TensorStatistics
from holdfast.state.tensors import DTYPES
from holdfast.storage.memory import aligned_buffer

#: The number of elements that are added up at a time.
_PART = 2**17

#: The number of elements for which torch uses no threads of its own: these would compete with the caller's.
_SERIAL = 2**15 - 2**6


class _FloatFormat(NamedTuple):
    """A format of floating-point numbers: the bits after the exponent, the number of exponents, and the one of 1.0."""

    fraction: int
    exponents: int
    bias: int


#: The upper half of a float64, which contains its exponent.
_UPPER_HALF = _FloatFormat(20, 2**11, 1023)

#: The dtypes whose exponents are read from their elements. Their numbers without exponent are all in the first bucket.
_FORMATS = {"F32": _FloatFormat(23, 2**8, 127), "BF16": _FloatFormat(7, 2**8, 127)}

Codes = npt.NDArray[np.int32]
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
            norm=0.0 if mean is None else math.sqrt(self.deviation + self.finite * mean * mean),
            std=math.sqrt(self.deviation / self.finite) if self.finite else None,
            histogram=tuple(self.histogram.tolist()),
        )


class Scratch:
    """Memory for the float64 values of a part, their distances from the mean, and codes. New memory would cost time."""

    def __init__(self) -> None:
        memory = aligned_buffer(2 * _PART * np.dtype(np.float64).itemsize).view(np.float64)
        self.values, self.distances = memory[:_PART], memory[_PART:]
        self.codes = np.empty(_SERIAL, np.int32)


def measure_part(bits: Bits, dtype: str, scratch: Scratch) -> PartialStatistics:
    """Return the statistics of at most 2^19 consecutive elements of one tensor, which begin at a multiple of these."""
    if bits.itemsize == 1:
        counts = _count_bytes(bits)
        used = np.flatnonzero(counts)
        return _measure_counts(_value_table(dtype)[used], counts[used])
    if dtype == "C64":
        bits, dtype = bits.view(np.uint32), "F32"
    merged = PartialStatistics()
    for start in range(0, len(bits), _PART):
        merged.merge(_measure_values(bits[start : start + _PART], dtype, scratch))
    return merged


@cache
def _value_table(dtype: str) -> Floats:
    """Return the values of all elements of one byte, by their bits."""
    values: Floats = as_values(np.arange(2**8, dtype=np.uint8), dtype)
    return values


def _count_bytes(elements: npt.NDArray[np.uint8]) -> Counts:
    """Return how often each byte occurs."""
    counts = np.zeros(2**8, np.int64)
    for start in range(0, len(elements), _SERIAL):
        counts += _count_codes(elements[start : start + _SERIAL], len(counts))
    return counts


def _count_codes(codes: npt.NDArray[np.uint8] | Codes, size: int) -> Counts:
    """Return how often each number below ``size`` occurs among at most ``_SERIAL``."""
    counts: Counts = torch.bincount(torch.from_numpy(codes), minlength=size).numpy()
    return counts


def _measure_counts(values: Floats, counts: Counts) -> PartialStatistics:
    """Return the statistics of different values, each of which occurs ``counts`` times."""
    part = PartialStatistics(
        elements=int(counts.sum()),
        nans=int(counts[np.isnan(values)].sum()),
        positive_infinities=int(counts[values == np.inf].sum()),
        negative_infinities=int(counts[values == -np.inf].sum()),
    )
    is_finite = np.isfinite(values)
    values, counts = values[is_finite], counts[is_finite]
    if len(values):
        codes = _upper_halves(values) >> np.uint32(_UPPER_HALF.fraction)
        by_exponent = np.zeros(2 * _UPPER_HALF.exponents, np.int64)
        np.add.at(by_exponent, codes, counts)
        part.histogram = _fold_counts(by_exponent, _UPPER_HALF, counts[values == 0], values[values == 0])
        part.finite, part.total = int(counts.sum()), float(np.add.reduce(values * counts))
        part.minimum, part.maximum = float(values.min()) + 0.0, float(values.max()) + 0.0
        part.deviation = float(np.add.reduce(np.square(values - part.total / part.finite) * counts))
    return part


def _measure_values(bits: Bits, dtype: str, scratch: Scratch) -> PartialStatistics:
    """Return the statistics of a part, whose elements have several bytes."""
    part, values = PartialStatistics(elements=len(bits)), scratch.values[: len(bits)]
    layout = _FORMATS.get(dtype, _UPPER_HALF)
    by_exponent = _convert_elements(bits, dtype, values, scratch.codes)
    if by_exponent[layout.exponents - 1] or by_exponent[-1]:
        part.nans = int(np.count_nonzero(np.isnan(values)))
        part.positive_infinities = int(np.count_nonzero(values == np.inf))
        part.negative_infinities = int(np.count_nonzero(values == -np.inf))
        values = values[np.isfinite(values)]
    has_zeros = by_exponent[0] or by_exponent[layout.exponents]  # or numbers that are nearly zero
    zeros = values[values == 0] if has_zeros else values[:0]
    part.histogram = _fold_counts(by_exponent, layout, np.ones(len(zeros), np.int64), zeros)
    if len(values):
        _measure_moments(values, scratch.distances[: len(values)], part)
    return part


def _convert_elements(bits: Bits, dtype: str, values: Floats, codes: Codes) -> Counts:
    """Convert elements to ``values``, and return how often each sign and exponent occurs. ``codes`` is memory."""
    layout = _FORMATS.get(dtype, _UPPER_HALF)
    sources = bits if dtype in _FORMATS else _upper_halves(values)
    shift = sources.dtype.type(layout.fraction)
    counts = np.zeros(2 * layout.exponents, np.int64)
    elements, converted = torch.from_numpy(bits.view(np.uint8)).view(DTYPES[dtype]), torch.from_numpy(values)
    for start in range(0, len(bits), len(codes)):
        stop = min(len(bits), start + len(codes))
        converted[start:stop].copy_(elements[start:stop])
        np.right_shift(sources[start:stop], shift, out=codes[: stop - start], casting="unsafe", dtype=sources.dtype)
        counts += _count_codes(codes[: stop - start], len(counts))
    return counts


def _upper_halves(values: Floats) -> npt.NDArray[np.uint32]:
    return values.view(np.uint32)[1 if sys.byteorder == "little" else 0 :: 2]


def _measure_moments(values: Floats, distances: Floats, part: PartialStatistics) -> None:
    """Add the range and the moments of finite values. ``distances`` is memory of the same size."""
    # -0.0 + 0.0 is 0.0: which of two equal zeros is the smaller one depends on the processor.
    part.minimum, part.maximum = float(values.min()) + 0.0, float(values.max()) + 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        part.finite, part.total = len(values), float(np.add.reduce(values))
        np.subtract(values, part.total / part.finite, out=distances)
        part.deviation = float(np.add.reduce(np.square(distances, out=distances)))


def _fold_counts(by_exponent: Counts, layout: _FloatFormat, zero_counts: Counts, zeros: Floats) -> Counts:
    """Return the histogram of finite values by sign and exponent, among them ``zeros``."""
    is_negative = np.signbit(zeros)
    by_exponent[0] -= zero_counts[~is_negative].sum()
    by_exponent[layout.exponents] -= zero_counts[is_negative].sum()
    positive, negative = by_exponent[: layout.exponents], by_exponent[layout.exponents :]
    folded = _fold_sign(negative, layout)[::-1], [zero_counts.sum()], _fold_sign(positive, layout)
    return np.concatenate(folded)


def _fold_sign(by_exponent: Counts, layout: _FloatFormat) -> Counts:
    first, last = layout.bias + EXPONENTS[0] + 1, layout.bias + EXPONENTS[-1]
    folded = by_exponent[first - 1 : last + 1].copy()
    folded[0], folded[-1] = by_exponent[:first].sum(), by_exponent[last : layout.exponents - 1].sum()
    return folded
