"""The fixture that opens the place of a case."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import rankless
from tests.promises.places import ON_RANKS, Place, Run, open_place


@pytest.fixture
def place(place_name: str, way: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Place]:
    ranks = request.getfixturevalue("ranks") if way == ON_RANKS else None
    with open_place(place_name, tmp_path) as opened:
        if isinstance(opened, Run):
            opened.way, opened.ranks = way, ranks
        yield opened
        rankless.finalize()
