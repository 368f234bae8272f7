"""Which cases a run has, and in which order: used by ``tests/conftest.py``.

``make test`` runs the cases by day. ``make test-all`` runs what is left out there: cases with the mark ``full``, and
the property tests again, with more examples.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from hypothesis import is_hypothesis_test

_TESTS = Path(__file__).parents[1]


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("rankless")
    group.addoption("--full", action="store_true", help="run every case, and property tests with all their examples")
    group.addoption("--left-out", action="store_true", help="run only what a run without --full leaves out")
    group.addoption(
        "--write-durations", action="store_true", help="write the seconds of each file, for the order of later runs"
    )


def is_left_out(item: pytest.Item) -> bool:
    """Whether a run without ``--full`` leaves this case out, or gives it fewer examples."""
    return item.get_closest_marker("full") is not None or is_hypothesis_test(getattr(item, "obj", None))


def select(items: Iterable[pytest.Item], config: pytest.Config) -> list[pytest.Item]:
    if config.option.left_out:
        return [item for item in items if is_left_out(item)]
    if config.option.full:
        return list(items)
    return [item for item in items if item.get_closest_marker("full") is None]


def durations_file(config: pytest.Config) -> Path:
    """Return where the seconds of each file of tests are, as the last run with ``--write-durations`` measured them.

    A file that takes long in ``make test-all`` may be done soon in ``make test``.
    """
    return _TESTS / ("durations_all.json" if config.option.full or config.option.left_out else "durations.json")


def read_durations(file: Path) -> dict[str, float]:
    return json.loads(file.read_text()) if file.exists() else {}


def order(items: Iterable[pytest.Item], durations: Mapping[str, float]) -> list[pytest.Item]:
    """Return the cases of the longest files first, so that no worker has a long file left when the others are done.

    Nobody has measured a new file yet: it comes first.
    """
    return sorted(items, key=lambda item: -durations.get(item.nodeid.partition("::")[0], float("inf")))


class DurationsFile:
    """Plugin of the process that collects the reports of all workers: writes the durations when all tests are done."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        known = read_durations(self._file) | {file: round(seconds, 1) for file, seconds in self._seconds.items()}
        present = {file: known[file] for file in sorted(known) if (_TESTS.parent / file).exists()}
        self._file.write_text(json.dumps(present, indent=0) + "\n")
