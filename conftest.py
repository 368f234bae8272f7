"""The garbage collector of the processes that run tests.

Pytest loads this file before ``tests/conftest.py``, which imports torch. A collection goes through all objects of
torch and of all modules of tests, half a second each time, and none of them is ever garbage.
"""

import gc

import pytest

gc.disable()

#: Python's own is 700: to look for garbage that often takes a fifteenth of the time of all tests.
_THRESHOLD = 20_000


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Collect garbage from here on, but only that of tests."""
    gc.freeze()
    gc.set_threshold(_THRESHOLD)
    gc.enable()
