"""Decisions about heartbeats: which rank to observe, and since when it is silent. Nothing is sent here.

The ranks form a ring. Each observes its successor, so that the heartbeats of any number of ranks are read once each.
For example, of four ranks rank 3 observes rank 0; if rank 0 has left, it observes rank 1.

:class:`~rankless.liveness.watcher.Watcher` asks it in its thread, on each rank. Time while this process was stopped
must not count as silence of another.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: The most ranks after a silent one that are examined, too.
SWEPT_RANKS = 64


class Ring:
    """The other ranks in the order that this one observes them in: the next if the one before has left."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size, self._distance = rank, size, 1

    @property
    def observed(self) -> int | None:
        """The rank to observe; ``None`` if all others have left."""
        return (self._rank + self._distance) % self._size if self._distance < self._size else None

    def skip(self) -> None:
        """Observe the next rank: this one has left."""
        self._distance += 1

    @property
    def successors(self) -> list[int]:
        """The ranks that follow the observed one, without this one."""
        last = min(self._size, self._distance + 1 + SWEPT_RANKS)
        return [(self._rank + distance) % self._size for distance in range(self._distance + 1, last)]


@dataclass
class SilenceMeter:
    """The seconds that something has not changed while this process looked at it.

    Time between two looks counts at most ``longest_gap``: if this process was stopped itself, perhaps with all others,
    it has seen nothing meanwhile.
    """

    longest_gap: float
    seconds: float = 0.0
    _value: bytes | None = field(default=None, repr=False)
    _looked_at: float = field(default=0.0, repr=False)

    def observe(self, value: bytes, now: float) -> float:
        """Take the value that is seen now. Return the seconds since it changed."""
        gap = min(now - self._looked_at, self.longest_gap)
        self.seconds = 0.0 if value != self._value else self.seconds + gap
        self._value, self._looked_at = value, now
        return self.seconds


def find_unchanged(before: dict[int, bytes], after: dict[int, bytes]) -> list[int]:
    """Return the ranks with an unchanged heartbeat."""
    return sorted(rank for rank, value in before.items() if after.get(rank) == value)
