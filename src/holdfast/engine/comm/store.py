"""The job's key-value store, with a deadline for each answer.

A store's client has none of its own for most calls: while the process that has the store is stopped, or its host cannot
be reached, they block. Without torchrun that process is rank 0's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch.distributed.distributed_c10d import Store

from holdfast.engine.comm.daemon_executor import DaemonExecutor


class DeadlineStore:
    """Raises ``TimeoutError`` where the store does not answer within ``seconds``, ``DistError`` where it is lost."""

    def __init__(self, store: Store, aside: DaemonExecutor, seconds: float) -> None:
        self._store, self._aside, self._seconds = store, aside, seconds

    def is_open(self) -> bool:
        """Whether keys can be set without waiting for another rank."""
        return True

    def has_met_all(self) -> bool:
        """Whether this rank is needed no more for any other to set keys."""
        return True

    def _place(self, key: str) -> str:
        """Where a key is in the store."""
        return key

    def set(self, key: str, value: bytes = b"") -> None:
        """Put a value under a key."""
        self._aside.ask(self._seconds, partial(self._store.set, self._place(key), value))  # type: ignore[arg-type]

    def add(self, key: str, amount: int) -> int:
        """Add to the number under a key, and return the sum."""
        return self._aside.ask(self._seconds, partial(self._store.add, self._place(key), amount))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return self._aside.ask(self._seconds, partial(self._store.check, [self._place(key) for key in keys]))

    def get(self, *keys: str) -> list[bytes]:
        """The values under keys that are there."""
        return self._aside.ask(self._seconds, partial(self._store.multi_get, [self._place(key) for key in keys]))

    def forget(self, *keys: str) -> None:
        """Remove keys, which takes a call each; nobody waits for it."""
        places = [self._place(key) for key in keys]

        def work() -> None:
            for place in places:
                self._store.delete_key(place)

        self._aside.begin(work)
