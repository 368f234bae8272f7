"""Accelerate's tests with rankless's ``Accelerator`` in the place of theirs: ``--rankless native``, or ``off``."""

# ruff: noqa: PLC0415 - nothing of Accelerate is imported if nothing is replaced
from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that says whether the class is replaced."""
    parser.addoption("--rankless", choices=["off", "native"], default="off")


def pytest_configure(config: pytest.Config) -> None:
    """Replace the class, before a test imports it."""
    if config.getoption("--rankless") == "native":
        import accelerate

        import rankless.accelerate

        accelerate.Accelerator = rankless.accelerate.Accelerator
