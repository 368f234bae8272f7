"""The job's key-value store, with a deadline for each call.

Most calls of a store's client have no timeout: while the process that hosts the store is stopped, or its host cannot be
reached, they block. Without torchrun that process is rank 0's.

All votes, :mod:`rankless.engine.comm.store_messages`, the gathering of CRCs and ``watch`` call the store through this
class, on every rank, in the thread that votes; the calls themselves run in the thread of a
:class:`~rankless.engine.comm.daemon_executor.DaemonExecutor`, one after another. No other code may call the store of
torch: its calls have no deadline, and two threads inside it would wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from rankless.engine.comm.daemon_executor import DaemonExecutor

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


class DeadlineStore:
    """A key-value store with a deadline for each call.

    They raise ``TimeoutError`` if the store does not answer within ``seconds``, ``DistError`` if it is lost.
    """

    def __init__(self, store: Store, executor: DaemonExecutor, seconds: float) -> None:
        self._store, self._executor, self._seconds = store, executor, seconds

    @contextmanager
    def limited_waits(self, seconds: float) -> Iterator[None]:
        """Wait for no answer longer than ``seconds`` inside the ``with`` block.

        A vote uses it on a rank that has no time left, in the thread that votes.
        """
        usual = self._seconds
        self._seconds = min(usual, seconds)
        try:
            yield
        finally:
            self._seconds = usual

    def is_open(self) -> bool:
        """Return whether keys can be set without waiting for another rank."""
        return True

    def has_met_all(self) -> bool:
        """Return whether no other rank needs this one any more in order to set keys."""
        return True

    def check_process(self) -> None:
        """Raise ``RankFailedError`` if this process was forked from the rank."""
        self._executor.check_process()

    def prefix(self) -> str:
        """Return the prefix of all keys, which no other job's keys have."""
        return self._full_key("")

    def _full_key(self, key: str) -> str:
        """Return a key with its prefix in the store."""
        return key

    def set(self, key: str, value: bytes = b"") -> None:
        """Set the value of a key."""
        self._executor.call_with_timeout(self._seconds, partial(self._store.set, self._full_key(key), value))  # type: ignore[arg-type]

    def set_all(self, values: Mapping[str, bytes]) -> None:
        """Set the values of many keys with one call."""
        keys = [self._full_key(key) for key in values]
        call = partial(self._store.multi_set, keys, list(values.values()))  # type: ignore[attr-defined]
        self._executor.call_with_timeout(self._seconds, call)

    def add(self, key: str, amount: int) -> int:
        """Add to the number under a key, and return the sum."""
        return self._executor.call_with_timeout(self._seconds, partial(self._store.add, self._full_key(key), amount))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are present."""
        return self._executor.call_with_timeout(
            self._seconds, partial(self._store.check, [self._full_key(key) for key in keys])
        )

    def get(self, *keys: str) -> list[bytes]:
        """Return the values of keys, which must be present."""
        return self._executor.call_with_timeout(
            self._seconds, partial(self._store.multi_get, [self._full_key(key) for key in keys])
        )

    def delete_keys(self, *keys: str) -> None:
        """Delete keys in the background, with one call each."""
        full_keys = [self._full_key(key) for key in keys]

        def delete_all() -> None:
            for full_key in full_keys:
                self._store.delete_key(full_key)

        self._executor.submit(delete_all)
