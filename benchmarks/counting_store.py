"""A key-value store that counts what passes through it, by part of a save: in a real job and in a simulated one.

Polls are left out: how many there are depends on the time. So are the messages in which gloo connects.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

#: The part of a save by the name of a key in a session.
_PARTS = {"message": "cells", "hashed": "CRCs", "parted": "leave"}

#: A key: the prefixes of the default group, the name of the group of ranks, its members; then a session, or a meeting.
_KEY = re.compile(r".*?/?rankless/[^/]*/[^/]*/(?:[0-9a-f]{16}/(?P<session>\d+)/(?P<name>.*)|(?P<meeting>[a-z]+.*))")


@dataclass
class Traffic:
    """Messages and their bytes: values that are set, got or added to."""

    messages: int = 0
    nbytes: int = 0

    def add(self, sizes: Sequence[int]) -> None:
        """Count values of some sizes."""
        self.messages += len(sizes)
        self.nbytes += sum(sizes)

    def remove(self, size: int) -> None:
        """Take back the count of a value."""
        self.messages -= 1
        self.nbytes -= size


@dataclass
class TrafficByPart:
    """The traffic of each part of a save, ``set`` into the store and ``read`` from it."""

    set: dict[str, Traffic] = field(default_factory=dict)
    read: dict[str, Traffic] = field(default_factory=dict)

    def add(self, direction: dict[str, Traffic], key: str, *sizes: int) -> None:
        """Count values under keys like this one."""
        part = part_of(key)
        if part:
            direction.setdefault(part, Traffic()).add(sizes)

    def rows(self) -> dict[str, tuple[int, int, int, int]]:
        """Return, by part: messages set, their bytes, messages read, their bytes."""
        none = Traffic()
        return {
            part: (
                self.set.get(part, none).messages,
                self.set.get(part, none).nbytes,
                self.read.get(part, none).messages,
                self.read.get(part, none).nbytes,
            )
            for part in sorted({*self.set, *self.read})
        }


def part_of(key: str) -> str:
    """Return the part of a save whose message has this key; empty for a message of something else."""
    match = _KEY.fullmatch(key)
    if match is None:
        return ""
    return "meeting" if match["meeting"] else _PARTS.get(match["name"].split("/")[0], "votes")


class CountingStore(Store):
    """A store in front of another one, which has the keys. ``before_check`` is called before keys are polled."""

    def __init__(self, store: Store, before_check: Callable[[Sequence[str]], None] = lambda _: None) -> None:
        super().__init__()
        self.store, self.traffic, self.before_check = store, TrafficByPart(), before_check

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """Set a value."""
        self.traffic.add(self.traffic.set, key, len(value))
        self.store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Wait for a value, and return it."""
        value: bytes = self.store.get(key)
        self.traffic.add(self.traffic.read, key, len(value))
        return value

    def multiGet(self, keys: list[str]) -> list[bytes]:  # noqa: N802 - the names of torch
        """Return values."""
        values: list[bytes] = self.store.multi_get(keys)
        for key, value in zip(keys, values, strict=True):
            self.traffic.add(self.traffic.read, key, len(value))
        return values

    def multiSet(self, keys: list[str], values: list[bytes]) -> None:  # noqa: N802
        """Set values."""
        self.store.multi_set(keys, values)

    def hasExtendedApi(self) -> bool:  # noqa: N802
        """Return whether several values can be set and got at once."""
        return True

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are present."""
        self.before_check(keys)
        return bool(self.store.check(keys))

    def add(self, key: str, amount: int) -> int:
        """Add to a number."""
        if amount:
            self.traffic.add(self.traffic.set, key, 8)
        return int(self.store.add(key, amount))

    def deleteKey(self, key: str) -> bool:  # noqa: N802
        """Delete a key."""
        return bool(self.store.delete_key(key))

    def compareSet(self, key: str, expected: bytes, desired: bytes) -> bytes:  # noqa: N802
        """Replace a value if it is the expected one."""
        return bytes(self.store.compare_set(key, expected, desired))  # type: ignore[arg-type]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for keys."""
        if timeout is None:
            self.store.wait(keys)
        else:
            self.store.wait(keys, timeout)

    def getNumKeys(self) -> int:  # noqa: N802
        """Return the number of keys."""
        return int(self.store.num_keys())
