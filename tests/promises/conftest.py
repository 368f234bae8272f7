"""The fixture that opens the place of a case."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import rankless
from tests.promises.places import Place, open_place


@pytest.fixture
def place(place_name: str, tmp_path: Path) -> Iterator[Place]:
    with open_place(place_name, tmp_path) as opened:
        yield opened
        rankless.finalize()
