"""The ratio of two contenders that were timed in the same rounds, and whether it is outside the noise. Pure functions.

The *interval* of a ratio is one that contains the true median with a probability of about 95 %, whatever the
distribution: from the k-th smallest to the k-th largest ratio of a round. The *noise* is how far such an interval
of two equal contenders reaches from 1: they run the same code in different processes, in the same rounds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

#: The most probability that the interval misses the true median.
_MISS = 0.07

#: With fewer rounds, the range of all ratios misses the median with a higher probability.
LEAST_ROUNDS = 5

#: The noise is never assumed to be smaller than this.
_LEAST_NOISE = 0.02


@dataclass(frozen=True)
class Ratio:
    """The median of the ratios of all rounds, and its interval."""

    median: float
    low: float
    high: float

    @classmethod
    def from_rounds(cls, seconds: Sequence[float], reference: Sequence[float]) -> Ratio:
        """Return the ratio of ``seconds`` to ``reference``, round by round."""
        ratios = sorted(time / other for time, other in zip(seconds, reference, strict=True))
        skipped = _count_skipped(len(ratios))
        return cls(statistics.median(ratios), ratios[skipped], ratios[-1 - skipped])

    @property
    def reach(self) -> float:
        """How far the interval reaches from 1, as a factor minus 1."""
        return max(self.high, 1 / self.low) - 1


def classify_ratio(ratio: Ratio, between_equals: Ratio) -> str:
    """Return ``"slower"`` or ``"faster"`` if the whole interval is outside the noise, else ``"no difference"``."""
    noise = compute_noise(between_equals)
    if ratio.low > 1 + noise:
        return "slower"
    return "faster" if ratio.high < 1 / (1 + noise) else "no difference"


def compute_noise(between_equals: Ratio) -> float:
    """Return the noise, given the ratio of two equal contenders."""
    return max(_LEAST_NOISE, between_equals.reach)


def _count_skipped(rounds: int) -> int:
    """Return how many ratios are outside the interval at each end: as many as the probability allows."""
    skipped, miss = 0, 2 * 0.5**rounds
    while miss + 2 * math.comb(rounds, skipped + 1) * 0.5**rounds <= _MISS:
        skipped += 1
        miss += 2 * math.comb(rounds, skipped) * 0.5**rounds
    return skipped
