"""Compact forms of columns of the page's data: names that share prefixes, and numbers as characters.

``assets/data.js`` has the inverse functions.

The other modules of this package use it; each form has its inverse in ``assets/data.js``, which must change together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise, takewhile
from typing import TypedDict, TypeVar

Item = TypeVar("Item")

#: The digits of quantised numbers, from the smallest to the largest.
DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_"

#: In place of a digit: there is no number, or it is not finite.
ABSENT = "."

_BASE = len(DIGITS)


class FrontCodedNames(TypedDict):
    """Names as the number of components that each shares with the one before, and the number of its further text."""

    shared: list[int]
    endings: list[str]
    ending: list[int]


def front_code(names: Sequence[str]) -> FrontCodedNames:
    """Compact sorted names with dots between their components.

    For example, ``a.b`` after ``a.a`` shares one component, and has the ending ``b``.
    """
    split = [name.split(".") for name in names]
    shared = [0] * bool(split) + [_count_shared(*pair) for pair in pairwise(split)]
    texts = [".".join(parts[number:]) for parts, number in zip(split, shared, strict=True)]
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    return {"shared": shared, "endings": list(numbers), "ending": [numbers[text] for text in texts]}


def _count_shared(before: Sequence[str], parts: Sequence[str]) -> int:
    """Return how many components are equal. At least one remains: an ending is never empty."""
    equal = takewhile(lambda pair: pair[0] == pair[1], zip(before, parts[:-1], strict=False))
    return sum(1 for _ in equal)


def round_number(value: float | None) -> float | None:
    """Round to four digits; ``None`` if there is no finite number. For example, 1234.56 becomes 1235.0."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


class LogScale:
    """A logarithmic scale of positive numbers in two digits: its step is a 4096th of the range of all numbers."""

    def __init__(self, numbers: Iterable[float]) -> None:
        logs = [math.log(number) for number in numbers if 0 < number < math.inf]
        self.low, self.high = (min(logs), max(logs)) if logs else (0.0, 0.0)

    def encode(self, number: float) -> str:
        """Return two digits. Zero is the lowest number."""
        logarithm = math.log(number) if number > 0 else self.low
        level = round(_place(logarithm, self.low, self.high) * (_BASE**2 - 1))
        return DIGITS[level // _BASE] + DIGITS[level % _BASE]


def encode_levels(numbers: Sequence[float | None], low: float, high: float) -> str:
    """Return one digit for each number: its place between ``low`` and ``high``.

    For example, ``low`` itself gets the first digit.
    """
    return "".join(
        ABSENT
        if number is None or not math.isfinite(number)
        else DIGITS[round(_place(number, low, high) * (_BASE - 1))]
        for number in numbers
    )


def _place(number: float, low: float, high: float) -> float:
    return min(1.0, max(0.0, (number - low) / (high - low))) if high > low else 0.0


def sample_evenly(items: Sequence[Item], count: int) -> list[Item]:
    """Return at most ``count`` of the items, at even distances, with the first and the last one."""
    if len(items) <= count:
        return list(items)
    return [items[round(place * (len(items) - 1) / (count - 1))] for place in range(count)]
