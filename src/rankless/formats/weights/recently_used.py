"""The values that were made last, and may be needed again: decoded ranges, and requested bytes of objects."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar


class _HasSize(Protocol):
    @property
    def nbytes(self) -> int: ...


#: About how many bytes the entry of a value takes, besides its own.
_ENTRY_BYTES = 1024

Kept = TypeVar("Kept", bound=_HasSize)


class RecentlyUsed(Generic[Kept]):
    """The values that were made last, by their keys, up to a number of bytes. Of several threads one makes a value.

    The threads that read a version ask for the values that they need.
    """

    def __init__(self, most_bytes: int) -> None:
        self._kept: OrderedDict[Hashable, Kept] = OrderedDict()
        self._nbytes, self._most = 0, most_bytes
        self._lock = threading.Lock()
        self._turns: dict[Hashable, threading.Lock] = {}

    def find(self, key: Hashable, make: Callable[[], Kept]) -> Kept:
        """Return the kept object of this key, or make it."""
        with self._lock:
            turn = self._turns.setdefault(key, threading.Lock())
        with turn:
            with self._lock:
                kept = self._kept.get(key)
                if kept is not None:
                    self._kept.move_to_end(key)
            if kept is None:
                kept = make()
                self._keep(key, kept)
        return kept

    def _keep(self, key: Hashable, made: Kept) -> None:
        with self._lock:
            self._kept[key] = made
            self._nbytes += made.nbytes + _ENTRY_BYTES
            while self._nbytes > self._most and len(self._kept) > 1:
                old, forgotten = self._kept.popitem(last=False)
                self._turns.pop(old, None)
                self._nbytes -= forgotten.nbytes + _ENTRY_BYTES
