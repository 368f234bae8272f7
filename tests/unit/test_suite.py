"""Which cases ``make test`` and ``make slow`` run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers import suite

_ROOT = Path(__file__).parents[2]


def test_slow_cases_are_tests_of_today() -> None:
    """A renamed test would be in ``make test`` again, slow as it is: ``make durations`` writes the list anew."""
    for case in suite.SLOW_CASES.read_text().splitlines():
        file, *_, name = case.partition("[")[0].split("::")
        assert f"def {name}(" in (_ROOT / file).read_text(), case


@pytest.mark.parametrize("left_out", [False, True])
def test_each_case_is_in_one_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, left_out: bool) -> None:
    monkeypatch.setattr(suite, "SLOW_CASES", tmp_path / "slow_cases.txt")
    suite.SLOW_CASES.write_text("file.py::slow\n")
    names = ["file.py::quick", "file.py::slow", "file.py::full"]
    items = [_Item(name, has_mark=name.endswith("full")) for name in names]
    runs = [["quick"], ["slow"], ["left_out"]] if left_out else [["quick"], ["slow"]]
    found = [item.nodeid for options in runs for item in suite.select(items, _config(*options))]  # type: ignore[arg-type]
    assert found == (names if left_out else names[:2])
    assert [item.nodeid for item in suite.select(items, _config())] == names[:2]  # type: ignore[arg-type]


class _Item:
    obj = None

    def __init__(self, nodeid: str, *, has_mark: bool) -> None:
        self.nodeid, self._has_mark = nodeid, has_mark

    def get_closest_marker(self, name: str) -> object | None:
        return name if self._has_mark else None


def _config(*options: str) -> Any:
    names = ("full", "left_out", "quick", "slow")
    return SimpleNamespace(option=SimpleNamespace(**{name: name in options for name in names}))
