"""Tests that the points at which campaigns kill and stop ranks exist."""

import pkgutil
from pathlib import Path

import pytest

import rankless
from campaigns.common.points import LOAD_POINTS, SAVE_POINTS, Point


@pytest.mark.parametrize("point", [*SAVE_POINTS, *LOAD_POINTS], ids=lambda point: point.name)
def test_a_point_is_a_function_and_its_phase_the_name_of_a_vote(point: Point) -> None:
    assert callable(pkgutil.resolve_name(point.function))
    sources = Path(rankless.__file__).parent.rglob("*.py")
    assert not point.phase or any(f'"{point.phase}"' in source.read_text() for source in sources)
