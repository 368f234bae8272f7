"""Changes that happen in the middle of a call."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def change_at_call(where: str, change: Callable[[], object], call: int = 1) -> Iterator[None]:
    """Something happens when a function is called for the first time, or a later one, before it does anything."""
    original = pkgutil.resolve_name(where)
    calls = 0

    def wrapped(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            change()
        return original(*args, **options)

    with mock.patch(where, wrapped):
        yield
    assert calls >= call, f"{where} was called {calls} times"
