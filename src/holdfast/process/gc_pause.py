"""Python's garbage collector, out of the way of saves and loads."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Pauses:
    """The pauses of this process. Those of several threads may overlap."""

    def __init__(self) -> None:
        self._lock, self._count, self._was_enabled = threading.Lock(), 0, False

    def begin(self) -> None:
        with self._lock:
            self._count += 1
            if self._count == 1:
                self._was_enabled = gc.isenabled()
                gc.disable()

    def end(self) -> None:
        with self._lock:
            self._count -= 1
            self._resume()

    def forget_in_fork(self) -> None:
        """The threads that would end the pauses are not in the forked process."""
        self._lock, was_paused, self._count = threading.Lock(), self._count > 0, 0
        if was_paused:
            self._resume()

    def _resume(self) -> None:
        if self._count == 0 and self._was_enabled:
            gc.enable()


_pauses = _Pauses()
os.register_at_fork(after_in_child=_pauses.forget_in_fork)


@contextmanager
def gc_paused() -> Iterator[None]:
    """No garbage collection meanwhile.

    Its passes over torch's heap, set off by many small records, cost a third of a save of 20,000 small tensors
    (measured). What saves and loads make has no cycles.
    """
    process = os.getpid()
    _pauses.begin()
    try:
        yield
    finally:
        if os.getpid() == process:
            _pauses.end()
