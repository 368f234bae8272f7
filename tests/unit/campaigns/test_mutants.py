"""Tests the mutants of ``campaigns/mutate``: what is changed, what is not, and how a run of the tests is judged."""

import json

import pytest

from campaigns.mutate.__main__ import read_results
from campaigns.mutate.mutants import draw_mutants, list_mutants
from campaigns.mutate.trial import CAUGHT, SURVIVED, TIMED_OUT, UNDECIDED, Outcome, read_outcome


def changes(source: str) -> set[str]:
    return {mutant.apply(source) for mutant in list_mutants("a.py", source)}


@pytest.mark.parametrize(
    ("source", "mutants"),
    [
        ("x = a < b", {"x = (a <= b)"}),
        ("x = a == b", {"x = (a != b)"}),
        ("x = a in b", {"x = (a not in b)"}),
        ("x = a - b", {"x = (a + b)"}),
        ("x = a and b", {"x = (a or b)"}),
        ("x = not a", {"x = (a)"}),
        ("x = a if b else c", {"x = (a if not b else c)"}),
        ("x = 1", {"x = (2)"}),
        ("x = f(a, b)", {"x = (f(b, a))"}),
        ("x = f(a, a)", set()),
        ("x = min(a, b)", set()),
        ("f(a)", {"pass"}),
        ("a.b = c", {"pass"}),
        ("def f():\n    return a", {"def f():\n    return None"}),
        ("def f():\n    return None", set()),
        ("é = 'é'; x = a < b", {"é = 'é'; x = (a <= b)"}),
        ("x = (\n    a\n    or b\n)\n", {"x = (\n    (a and b)\n)\n"}),
    ],
)
def test_each_kind_of_change(source: str, mutants: set[str]) -> None:
    assert changes(source) == mutants


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring."""',
        "x: Literal[1]",
        "def f(x: a | b) -> c | d: ...",
        "__all__ = ['a', 'b'] + ['c']",
        "if TYPE_CHECKING:\n    x = 1",
        "logger.info('%s', 1)",
        "x = f'{a + b}'",
    ],
)
def test_what_does_not_run_and_what_people_read_is_not_changed(source: str) -> None:
    assert changes(source) == set()


def test_of_an_error_only_the_statement_is_dropped() -> None:
    assert changes("raise ValueError(a + 1)") == {"pass"}


def test_a_seed_draws_the_same_mutants_and_none_twice() -> None:
    sources = {"a.py": "x = a < b\ny = c + d - e\nz = 1\nf(g, h, i)", "b.py": "x = a and not b"}
    everything = draw_mutants(sources, 100, seed=3)
    assert draw_mutants(sources, 100, seed=3) == everything
    assert draw_mutants(sources, 4, seed=3) == everything[:4]
    assert draw_mutants(sources, 4, seed=4) != everything[:4]
    assert len({mutant.name for mutant in everything}) == len(everything) == 9


PASSED = "tests/unit/test_a.py::test_x PASSED [ 50%]\n"


@pytest.mark.parametrize(
    ("code", "output", "outcome"),
    [
        (0, PASSED, Outcome(SURVIVED, "", 1)),
        (5, "no tests ran\n", Outcome(SURVIVED, "", 0)),
        (1, PASSED + "FAILED tests/a.py::test_y[a b] - assert 1\n", Outcome(CAUGHT, "tests/a.py::test_y[a b]", 1)),
        (2, "ERROR tests/a.py - NameError\n", Outcome(CAUGHT, "tests/a.py", 0)),
        (
            1,
            "FAILED tests/a.py::b - Failed: Timeout (>9s) from pytest-timeout.\n",
            Outcome(TIMED_OUT, "tests/a.py::b", 0),
        ),
        (-11, PASSED, Outcome(CAUGHT, "pytest ended with -11", 1)),
        (None, PASSED, Outcome(UNDECIDED, "", 1)),
    ],
)
def test_the_outcome_is_what_pytest_reports(code: int | None, output: str, outcome: Outcome) -> None:
    assert read_outcome(code, output) == outcome


def test_results_go_on_from_the_last_status_of_each_mutant(tmp_path) -> None:
    results = tmp_path / "results.jsonl"
    assert read_results(results) == {}
    lines = [{"name": "a", "status": UNDECIDED}, {"name": "b", "status": CAUGHT}, {"name": "a", "status": SURVIVED}]
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_results(results) == {"a": SURVIVED, "b": CAUGHT}
