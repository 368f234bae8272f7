"""A training for the tests of published weights."""

from pathlib import Path

import pytest

from tests.helpers.published_training import Training


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path)
