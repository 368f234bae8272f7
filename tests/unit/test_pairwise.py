"""Tests the choice of the cases of a product that ``make test`` runs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.helpers.pairwise import choose_covering, each_value, first_of, pairwise

SIZES = [(2, 3, 4), (4, 4, 2), (3, 3, 3, 3), (5, 1, 2), (6, 7)]


@pytest.mark.parametrize("sizes", SIZES)
def test_each_pair_of_values_of_two_axes_is_covered(sizes: tuple[int, ...]) -> None:
    covered = {
        (a, case[a], b, case[b])
        for case in choose_covering(sizes, 2)
        for a, b in itertools.combinations(range(len(sizes)), 2)
    }
    assert len(covered) == sum(m * n for m, n in itertools.combinations(sizes, 2))


@pytest.mark.parametrize("sizes", SIZES)
def test_each_value_is_covered_by_as_few_cases_as_possible(sizes: tuple[int, ...]) -> None:
    cases = choose_covering(sizes, 1)
    assert all({case[axis] for case in cases} == set(range(size)) for axis, size in enumerate(sizes))
    assert len(cases) == max(sizes)


def test_pairs_need_fewer_cases_than_the_product() -> None:
    assert len(choose_covering((3, 3, 3, 3), 2)) < 20


def cases_of(mark: pytest.MarkDecorator) -> list[Any]:
    return list(mark.mark.args[1])


def test_all_combinations_are_cases_and_those_that_are_left_out_are_marked_full() -> None:
    cases = cases_of(pairwise({"a": "xy", "b": [1, 2], "c": [True, False]}))
    assert [case.values for case in cases] == list(itertools.product("xy", [1, 2], [True, False]))
    day = [case.values for case in cases if not case.marks]
    assert len(day) == 4
    assert all(mark.name == "full" for case in cases for mark in case.marks)


def test_two_axes_of_which_each_value_is_enough() -> None:
    day = [case.values for case in cases_of(each_value({"a": "xyz", "b": "uv"})) if not case.marks]
    assert day == [("x", "u"), ("y", "v"), ("z", "u")]


def test_an_axis_of_tuples_has_several_arguments() -> None:
    mark = pairwise({"a, b": [(1, 2), (3, 4)], "c": "x"})
    assert mark.mark.args[0] == "a, b, c"
    assert [case.values for case in cases_of(mark)] == [(1, 2, "x"), (3, 4, "x")]


def test_the_first_cases_are_run_by_day_and_keep_their_marks_and_ids() -> None:
    named = pytest.param(3, id="three")
    names, cases = first_of(2, "number", [1, named, 5]).args
    assert names == "number"
    assert [(case.values, case.id, [mark.name for mark in case.marks]) for case in cases] == [
        ((1,), None, []),
        ((3,), "three", []),
        ((5,), None, ["full"]),
    ]
    pairs = first_of(1, ("a", "b"), [(1, 2), (3, 4)]).args[1]
    assert [case.values for case in pairs] == [(1, 2), (3, 4)]
