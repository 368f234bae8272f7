"""The numerics of statistics: those of a part of a tensor, and how parts are merged. Pure functions of arrays.

Elements are added in a fixed order, so that statistics do not depend on ranks, threads, or how files were read:

1. A tensor is cut into sections of 2^15 elements. NumPy adds up a section as float64, pairwise, and then the squares
   of the distances from the mean of the section. Elements that are not finite are left out before.
2. The sections of each 2^19 elements are merged one after the other, and then these parts one after the other, by the
   rule of Chan, Golub and LeVeque. It needs no second pass, and does not cancel where the mean is large.

Counts are exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from holdfast.inspection.element_values import Bits, as_values
from holdfast.inspection.tensor_statistics import BUCKETS, EXPONENTS, ZERO_BUCKET, TensorStatistics

#: The number of elements that are added up at a time. Their float64 values fit into the processor's second cache, and
#: torch converts so few in the thread that asks for it.
_SECTION = 2**15

#: The bits of the fraction of float64, the number of its exponents, and the one of 1.0.
_FRACTION_BITS, _EXPONENTS, _BIAS = 52, 2**11, 1023

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


def measure_part(bits: Bits, dtype: str) -> PartialStatistics:
    """Return the statistics of a part of one tensor, which begins at a multiple of ``_SECTION`` elements of it."""
    part, counts = PartialStatistics(), np.zeros(2 * _EXPONENTS, np.int64)
    for start in range(0, len(bits), _SECTION):
        values = as_values(bits[start : start + _SECTION], dtype).view(np.float64)
        part.merge(_measure_section(values, counts))
    part.histogram += _fold_counts(counts)
    return part


def _measure_section(values: Floats, counts: Counts) -> PartialStatistics:
    """Return the statistics of a section without its histogram; only zeros are in there.

    The numbers of its values by sign and exponent, without zeros, are added to ``counts``.
    """
    section = PartialStatistics(len(values))
    by_exponent = np.bincount(
        (values.view(np.uint64) >> np.uint64(_FRACTION_BITS)).view(np.int64), minlength=len(counts)
    )
    finite = values
    if by_exponent[_EXPONENTS - 1] or by_exponent[-1]:
        finite = values[np.isfinite(values)]
        section.nans = int(np.count_nonzero(np.isnan(values)))
        section.positive_infinities = int(np.count_nonzero(values == np.inf))
        section.negative_infinities = len(values) - len(finite) - section.nans - section.positive_infinities
    if by_exponent[0] or by_exponent[_EXPONENTS]:
        zeros = values[values == 0]
        section.histogram[ZERO_BUCKET] = len(zeros)
        negative = np.count_nonzero(np.signbit(zeros))
        by_exponent[0] -= len(zeros) - negative
        by_exponent[_EXPONENTS] -= negative
    counts += by_exponent
    if len(finite):
        _measure_moments(finite, section)
    return section


def _measure_moments(finite: Floats, section: PartialStatistics) -> None:
    section.finite = len(finite)
    # -0.0 + 0.0 is 0.0: which of two equal zeros is the smaller one depends on the processor.
    section.minimum, section.maximum = float(finite.min()) + 0.0, float(finite.max()) + 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        section.total = float(np.add.reduce(finite))
        distances = finite - section.total / section.finite
        section.deviation = float(np.add.reduce(np.square(distances, out=distances)))


def _fold_counts(counts: Counts) -> Counts:
    """Return the histogram of counts by sign and exponent."""
    positive, negative = (_fold_sign(half) for half in np.split(counts, 2))
    return np.concatenate([negative[::-1], [0], positive])


def _fold_sign(counts: Counts) -> Counts:
    first, last = _BIAS + EXPONENTS[0] + 1, _BIAS + EXPONENTS[-1]
    folded = counts[first - 1 : last + 1].copy()
    folded[0], folded[-1] = counts[:first].sum(), counts[last : _EXPONENTS - 1].sum()
    return folded
