"""Spans: ranges of numbers, as the offsets of bytes, from the first one to the one after the last."""

from __future__ import annotations

from collections.abc import Iterable


def merge_spans(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return sorted spans that neither overlap nor touch.

    For example, ``[(5, 7), (0, 3), (3, 4)]`` becomes ``[(0, 4), (5, 7)]``.
    """
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        elif start < stop:
            merged.append((start, stop))
    return merged
