"""The garbage collector during collection.

Pytest loads this file before ``tests/conftest.py``, which imports torch. A collection goes through all objects of
torch and of all modules of tests, half a second each time, and none of them is ever garbage.
"""

import gc

import pytest

gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Collect garbage from here on, but only that of tests."""
    gc.freeze()
    gc.enable()
