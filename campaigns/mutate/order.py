"""Plugin of pytest: runs files in the order of the command line, those first that probably catch the mutant."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the cases, after ``tests/conftest.py`` has put the longest files first."""
    places = {Path(file).resolve(): place for place, file in enumerate(config.args)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
