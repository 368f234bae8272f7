"""Which cases a run has, and in which order: used by ``tests/conftest.py``.

``make test`` runs the quick cases, ``make slow`` the slow ones: the last ``make durations`` measured that they take
long. ``make left-out`` runs what both leave out: cases with the mark ``full``, and the property tests again, with more
examples. Without an option, as in a run of one file, a run has the quick cases and the slow ones.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from hypothesis import is_hypothesis_test

_TESTS = Path(__file__).parents[1]

#: The slow cases, one on each line.
SLOW_CASES = _TESTS / "slow_cases.txt"

#: A case is slow if it takes more seconds than that, next to the three others that ``make`` runs at a time.
_SLOW = 1.2

#: Files without slow cases: every change can break the rules that they check.
_QUICK = ("tests/unit/test_architecture.py", "tests/docs/test_prose.py")


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("rankless")
    group.addoption("--full", action="store_true", help="run every case, and property tests with all their examples")
    group.addoption("--quick", action="store_true", help="leave out the slow cases")
    group.addoption("--slow", action="store_true", help="run only the slow cases")
    group.addoption("--left-out", action="store_true", help="run only what a run without --full leaves out")
    group.addoption(
        "--write-durations", action="store_true", help="write the seconds of each file, for the order of later runs"
    )


def has_more_cases(config: pytest.Config) -> bool:
    """Whether this run has cases with the mark ``full``, and all examples of property tests."""
    return bool(config.option.full or config.option.left_out)


def is_left_out(item: pytest.Item) -> bool:
    """Whether a run without ``--full`` leaves this case out, or gives it fewer examples."""
    return item.get_closest_marker("full") is not None or is_hypothesis_test(getattr(item, "obj", None))


def select(items: Iterable[pytest.Item], config: pytest.Config) -> list[pytest.Item]:
    option = config.option
    if has_more_cases(config):
        return [item for item in items if option.full or is_left_out(item)]
    cases = [item for item in items if item.get_closest_marker("full") is None]
    if not (option.quick or option.slow):
        return cases
    slow = set(SLOW_CASES.read_text().splitlines())
    return [item for item in cases if (item.nodeid in slow) == option.slow]


def durations_file(config: pytest.Config) -> Path:
    """Return where the seconds of each file of tests are, as the last run with ``--write-durations`` measured them.

    A file that takes long in ``make test-all`` may be done soon in ``make test``.
    """
    return _TESTS / ("durations_all.json" if has_more_cases(config) else "durations.json")


def read_durations(file: Path) -> dict[str, float]:
    return json.loads(file.read_text()) if file.exists() else {}


def order(items: Iterable[pytest.Item], durations: Mapping[str, float]) -> list[pytest.Item]:
    """Return the cases of the longest files first, so that no worker has a long file left when the others are done.

    Nobody has measured a new file yet: it comes first.
    """
    return sorted(items, key=lambda item: -durations.get(_file_of(item.nodeid), float("inf")))


class DurationsFile:
    """Plugin of the process that collects the reports of all workers: writes the durations when all tests are done.

    A run of the quick cases and the slow ones also writes which are slow.
    """

    def __init__(self, file: Path, *, writes_slow_cases: bool) -> None:
        self._file, self._writes_slow_cases = file, writes_slow_cases
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        files = Counter[str]()
        for case, seconds in self._seconds.items():
            files[_file_of(case)] += seconds
        known = read_durations(self._file) | {file: round(seconds, 1) for file, seconds in files.items()}
        present = {file: known[file] for file in sorted(known) if (_TESTS.parent / file).exists()}
        self._file.write_text(json.dumps(present, indent=0) + "\n")
        if self._writes_slow_cases:
            slow = (case for case in self._seconds if self._seconds[case] > _SLOW and _file_of(case) not in _QUICK)
            SLOW_CASES.write_text("".join(f"{case}\n" for case in sorted(slow)))


def _file_of(case: str) -> str:
    return case.partition("::")[0]
