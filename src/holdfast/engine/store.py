"""The job's key-value store, with a deadline for each answer.

A store's client has none of its own for most calls: while the process that has the store is stopped, or its host cannot
be reached, they block. Without torchrun that process is rank 0's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch.distributed.distributed_c10d import PrefixStore, Store

from holdfast.engine.aside import Aside


class PromptStore:
    """Raises ``TimeoutError`` where the store does not answer within ``seconds``, ``DistError`` where it is lost."""

    def __init__(self, store: Store, aside: Aside, seconds: float) -> None:
        self._store, self._aside, self._seconds = store, aside, seconds

    def under(self, prefix: str) -> PromptStore:
        """The part of the store with keys of this prefix."""
        return PromptStore(PrefixStore(prefix, self._store), self._aside, self._seconds)

    def set(self, key: str, value: bytes = b"") -> None:
        """Put a value under a key."""
        self._aside.ask(self._seconds, partial(self._store.set, key, value))  # type: ignore[arg-type]

    def add(self, key: str, amount: int) -> int:
        """Add to the number under a key, and return the sum."""
        return self._aside.ask(self._seconds, partial(self._store.add, key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return self._aside.ask(self._seconds, partial(self._store.check, list(keys)))

    def get(self, *keys: str) -> list[bytes]:
        """The values under keys that are there."""
        return self._aside.ask(self._seconds, partial(self._store.multi_get, list(keys)))

    def forget(self, *keys: str) -> None:
        """Remove keys, which takes a call each; nobody waits for it."""

        def work() -> None:
            for key in keys:
                self._store.delete_key(key)

        self._aside.begin(work)
