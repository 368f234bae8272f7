"""A connection to the job's key-value store for a background thread alone."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.distributed_c10d import Store

from rankless.torch_versions import clone_store


class SeparateConnection(Store):
    """A connection next to that of the training, in which a blocking call of the training would hold up all others.

    It is opened at the first call, because that may take seconds.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._shared = store
        self._own: Store | None = None

    @property
    def _connection(self) -> Store:
        if self._own is None:
            self._own = clone_store(self._shared)
        return self._own

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """Set the value of a key."""
        self._connection.set(key, value)  # type: ignore[arg-type]

    def add(self, key: str, amount: int) -> int:
        """Add to the number under a key, and return the sum."""
        return self._connection.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are present."""
        return self._connection.check(keys)

    def multi_get(self, keys: list[str]) -> Sequence[bytes]:  # type: ignore[override]
        """Return the values of keys."""
        return self._connection.multi_get(keys)

    def delete_key(self, key: str) -> bool:
        """Delete a key."""
        return self._connection.delete_key(key)
