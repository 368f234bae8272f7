"""Products of cases: all in ``make test-all``, and as few as cover each pair, or each value, in ``make test``."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

#: A choice of values: of each of some axes the index of one value.
_Choice = frozenset[tuple[int, int]]


def pairwise(axes: Mapping[str, Iterable[Any]]) -> pytest.MarkDecorator:
    """Parametrize a test by all combinations; ``make test`` runs enough for each pair of values of two axes."""
    return _parametrize(axes, 2)


def each_value(axes: Mapping[str, Iterable[Any]]) -> pytest.MarkDecorator:
    """Parametrize a test by all combinations; ``make test`` runs enough for each value of each axis."""
    return _parametrize(axes, 1)


def first_of(count: int, names: Any, cases: Iterable[Any], *, ids: Any = None) -> pytest.MarkDecorator:
    """Parametrize a test by all cases; ``make test`` runs the first ``count``, which are the most telling ones."""
    marked = []
    for number, case in enumerate(cases):
        has_marks = isinstance(case, type(pytest.param()))
        values = case.values if has_marks else case if _is_plural(names) else (case,)
        marks = [*(case.marks if has_marks else ()), *([] if number < count else [pytest.mark.full])]
        marked.append(pytest.param(*values, id=case.id if has_marks else None, marks=marks))
    return pytest.mark.parametrize(names, marked, ids=ids)


def _is_plural(names: Any) -> bool:
    return not isinstance(names, str) or "," in names


def _parametrize(axes: Mapping[str, Iterable[Any]], strength: int) -> pytest.MarkDecorator:
    """An axis ``"a, b"`` has tuples of two arguments as values."""
    values = [[tuple(value) if "," in name else (value,) for value in axis] for name, axis in axes.items()]
    covering = choose_covering([len(axis) for axis in values], strength)
    cases = []
    for indices in itertools.product(*(range(len(axis)) for axis in values)):
        marks = () if indices in covering else pytest.mark.full
        chosen = (axis[index] for axis, index in zip(values, indices, strict=True))
        cases.append(pytest.param(*itertools.chain.from_iterable(chosen), marks=marks))
    return pytest.mark.parametrize(", ".join(axes), cases)


def choose_covering(sizes: Sequence[int], strength: int) -> set[tuple[int, ...]]:
    """Return combinations of indices below ``sizes`` that have each choice of values of ``strength`` axes.

    Greedy: next comes the first of the combinations with the most choices that the earlier ones lack.
    """
    combinations = {indices: _choices(indices, strength) for indices in itertools.product(*map(range, sizes))}
    missing = set().union(*combinations.values())
    chosen = set()
    while missing:
        best = max(combinations, key=lambda indices: len(combinations[indices] & missing))
        missing -= combinations.pop(best)
        chosen.add(best)
    return chosen


def _choices(indices: tuple[int, ...], strength: int) -> set[_Choice]:
    return {frozenset(choice) for choice in itertools.combinations(enumerate(indices), strength)}
