"""The statistics of the tensors of checkpoints as columns: the last values, a small histogram, and how norms moved.

:mod:`rankless.report.run_report` calls it. The scripts of the page read the columns. A change here needs the same
change there.

Norms are rounded to a 64th of their range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rankless.inspection.tensor_statistics import ZERO_BUCKET, TensorStatistics
from rankless.report.compaction import DIGITS, LogScale, encode_levels, round_number
from rankless.report.tensor_columns import NamedTensor

#: The bars of a small histogram for each sign, and the powers of two in each.
_BARS, _POWERS = 8, 2

#: In place of a level: the tensor had elements that are not finite.
_NOT_FINITE = "!"

#: The statistics of a checkpoint by the name of the tensor with its group.
Statistics = Mapping[str, TensorStatistics]


def statistics_columns(tensors: Sequence[NamedTensor], history: Sequence[tuple[str, Statistics]]) -> dict[str, Any]:
    """Return columns of the last of several statistics, and of the norm in each of them.

    ``history`` has the tag and the statistics of checkpoints, oldest first.
    """
    names = [f"{tensor.group}/{tensor.name}" for tensor in tensors]
    rows = [[statistics.get(name) for _, statistics in history] for name in names]
    last = [row[-1] for row in rows]
    scale = LogScale(each.norm for row in rows for each in row if each is not None and each.norm is not None)
    return {
        "tags": [tag for tag, _ in history],
        "norm": [None if each is None else round_number(each.norm) for each in last],
        "min": [None if each is None else round_number(each.minimum) for each in last],
        "max": [None if each is None else round_number(each.maximum) for each in last],
        "nans": _sparse_counts([0 if each is None else each.nans for each in last]),
        "infs": _sparse_counts([_count_infinities(each) for each in last]),
        "histograms": [_encode_histogram(each) for each in last],
        "scale": [scale.low, scale.high],
        "norms": [_encode_norms(row, scale) for row in rows],
        "not_finite": [sum(_has_bad(each) for each in statistics.values()) for _, statistics in history],
    }


def _sparse_counts(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the row and the count of each count that is not zero."""
    return [(row, count) for row, count in enumerate(counts) if count]


def _count_infinities(each: TensorStatistics | None) -> int:
    return 0 if each is None else each.positive_infinities + each.negative_infinities


def _has_bad(each: TensorStatistics | None) -> bool:
    return each is not None and each.finite < each.elements


def _encode_norms(row: Sequence[TensorStatistics | None], scale: LogScale) -> str:
    """Return the smallest and the largest norm as two digits each, and the place of each norm between them."""
    norms = [each.norm for each in row if each is not None and each.norm is not None and each.elements]
    if not norms:
        return ""
    low, high = min(norms), max(norms)
    levels = encode_levels([None if each is None else each.norm for each in row], low, high)
    marked = (_NOT_FINITE if _has_bad(each) else level for each, level in zip(row, levels, strict=True))
    return scale.encode(low) + scale.encode(high) + "".join(marked)


def _encode_histogram(each: TensorStatistics | None) -> str:
    """Return the level of each bar, bars of negative numbers first, and the highest power of two before them.

    The bar in the middle is for zeros. Numbers that are too small for a bar are in the one next to it.
    """
    if each is None or not each.finite:
        return ""
    positive = each.histogram[ZERO_BUCKET + 1 :]
    negative = each.histogram[:ZERO_BUCKET][::-1]
    top = max(place for place, pair in enumerate(zip(positive, negative, strict=True)) if any(pair) or not place)
    bars = [*_sum_bars(negative, top)[::-1], each.histogram[ZERO_BUCKET], *_sum_bars(positive, top)]
    return f"{DIGITS[top // 64]}{DIGITS[top % 64]}{encode_levels(bars, 0, max(bars))}"


def _sum_bars(buckets: Sequence[int], top: int) -> list[int]:
    """Return the bars of one sign, from the smallest magnitudes to the magnitudes of the bucket ``top``."""
    starts = [top + 1 - _POWERS * (_BARS - bar) for bar in range(_BARS)]
    return [sum(buckets[max(0, start) if bar else 0 : max(0, start + _POWERS)]) for bar, start in enumerate(starts)]
