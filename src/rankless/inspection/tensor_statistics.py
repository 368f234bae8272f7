"""The statistics of one tensor: a record for programs, without NumPy.

Statistics return it, and ``.statistics`` has it: the buckets must stay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: The powers of two of magnitudes that have buckets of their own in a histogram. They hold all weights and gradients
#: that train, and squares of gradients down to 2e-10. Smaller and larger magnitudes are in the first and the last one.
EXPONENTS = range(-64, 16)

#: The bucket of zeros. Buckets of negative numbers are before it, buckets of positive ones after it.
ZERO_BUCKET = len(EXPONENTS)

#: The number of buckets.
BUCKETS = 2 * len(EXPONENTS) + 1


@dataclass(frozen=True, slots=True)
class TensorStatistics:
    """The statistics of a tensor.

    All values are converted to float64; ``False`` and ``True`` are 0 and 1. An element of a complex tensor counts as
    two: its real and its imaginary part. ``minimum``, ``maximum``, ``mean``, ``norm``, ``std`` and ``histogram`` count
    the finite elements, including zeros. Of a tensor of float64, ``mean``, ``norm`` and ``std`` are infinite or NaN if
    float64 overflows.

    The histogram has the same buckets for every tensor, so histograms of several checkpoints can be compared, and
    histograms of several tensors added: one bucket for each sign and power of two, in ascending order of the numbers.
    For example, 3.0 is in the bucket of 2 to 4. See :func:`bucket_bounds`.

    Attributes:
        elements: The number of elements, finite or not.
        nans: The number of elements that are NaN.
        positive_infinities: The number of elements that are +inf.
        negative_infinities: The number of elements that are -inf.
        zeros: The number of elements that are 0 or -0.
        minimum: The smallest finite element; ``None`` if no element is finite.
        maximum: The largest finite element; ``None`` if no element is finite.
        mean: Their mean; ``None`` if no element is finite.
        norm: The square root of the sum of their squares; ``None`` if there are elements, and none is finite.
        std: Their standard deviation, divided by their number; ``None`` if no element is finite.
        histogram: The number of finite elements in each of :data:`BUCKETS` buckets.
    """

    elements: int
    nans: int
    positive_infinities: int
    negative_infinities: int
    zeros: int
    minimum: float | None
    maximum: float | None
    mean: float | None
    norm: float | None
    std: float | None
    histogram: tuple[int, ...]

    @property
    def finite(self) -> int:
        """The number of elements that are neither NaN nor infinite."""
        return self.elements - self.nans - self.positive_infinities - self.negative_infinities


def bucket_bounds(bucket: int) -> tuple[float, float]:
    """Return the bounds of a bucket of a histogram.

    Numbers from the bound that is nearer to zero on are inside; the other bound is outside, unless both are 0.
    """
    if bucket == ZERO_BUCKET:
        return 0.0, 0.0
    place = abs(bucket - ZERO_BUCKET) - 1
    low = 2.0 ** EXPONENTS[place] if place else 0.0
    high = 2.0 ** (EXPONENTS[place] + 1) if place < len(EXPONENTS) - 1 else math.inf
    return (low, high) if bucket > ZERO_BUCKET else (-high, -low)
