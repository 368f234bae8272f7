"""Ranks that are threads, and exchange bytes in memory as :class:`rankless.engine.io.p2p.P2PExchange` does."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from rankless.storage.aligned_memory import Bytes

#: Seconds after which a rank that does not end fails the test.
PATIENCE = 30

T = TypeVar("T")


@dataclass
class Transfer:
    """Bytes that one rank sends to another. They are copied when one of both waits for them, and not before."""

    data: Bytes | None = None
    into: Bytes | None = None
    done: bool = False

    @property
    def has_met(self) -> bool:
        """True if both ranks have begun it."""
        return self.data is not None and self.into is not None

    def move(self) -> None:
        if not self.done:
            assert len(self.data) == len(self.into), "one rank sends what another does not expect"
            np.copyto(self.into, self.data)
            self.done = True


class StuckError(Exception):
    """Ranks wait for each other, or for one that has ended."""


class ThreadNetwork:
    """All transfers between some ranks. Sends and receives of two ranks match in the order in which both begin them."""

    def __init__(self, size: int) -> None:
        self._changed = threading.Condition()
        self._begun: dict[tuple[int, int, str], deque[Transfer]] = defaultdict(deque)
        self._working = set(range(size))
        self._waiting: dict[int, Sequence[Transfer]] = {}

    def begin(self, source: int, to: int, side: str, data: Bytes) -> Transfer:
        """Begin one side of a transfer."""
        with self._changed:
            waiting = self._begun[source, to, "into" if side == "data" else "data"]
            transfer = waiting.popleft() if waiting else Transfer()
            setattr(transfer, side, data)
            if transfer.has_met:
                self._changed.notify_all()
            else:
                self._begun[source, to, side].append(transfer)
            return transfer

    def wait(self, rank: int, works: Sequence[Transfer]) -> None:
        """Wait until both sides of all transfers have begun, then copy the bytes."""
        with self._changed:
            self._waiting[rank] = works
            self._changed.notify_all()
            self._changed.wait_for(lambda: have_met(works) or self._stuck(), PATIENCE)
            if not have_met(works):
                raise StuckError(f"rank {rank} waits for a rank that never comes")
            del self._waiting[rank]
            for work in works:
                work.move()

    def leave(self, rank: int) -> None:
        """Record that a rank has done its work, or has failed."""
        with self._changed:
            self._working.discard(rank)
            self._changed.notify_all()

    def _stuck(self) -> bool:
        return all(rank in self._waiting and not have_met(self._waiting[rank]) for rank in self._working)


def have_met(works: Sequence[Transfer]) -> bool:
    return all(work.has_met for work in works)


class ThreadP2P:
    """One rank's end of the network. A send is done when it is received, and not before."""

    def __init__(self, rank: int, post: ThreadNetwork) -> None:
        self.rank, self._network = rank, post

    def send(self, data: Bytes, to: int) -> Transfer:
        assert to != self.rank
        return self._network.begin(self.rank, to, "data", data)

    def receive(self, into: Bytes, source: int) -> Transfer:
        assert source != self.rank
        return self._network.begin(source, self.rank, "into", into)

    def wait(self, works: Sequence[Transfer]) -> None:
        self._network.wait(self.rank, works)


class RankOutcome(NamedTuple):
    """The result or the error of a rank."""

    value: Any = None
    error: BaseException | None = None


def run_ranks(size: int, work: Callable[[int, ThreadP2P], T]) -> list[RankOutcome]:
    """Run ``work`` on all ranks at the same time. Return the outcome of each. Raises ``StuckError``."""
    post = ThreadNetwork(size)
    actual = [RankOutcome(error=StuckError(f"rank {rank} does not end")) for rank in range(size)]

    def run(rank: int) -> None:
        try:
            actual[rank] = RankOutcome(work(rank, ThreadP2P(rank, post)))
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            actual[rank] = RankOutcome(error=error)
        post.leave(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    errors = [outcome.error for outcome in actual if outcome.error is not None]
    if any(isinstance(error, StuckError) for error in errors):
        raise min(errors, key=lambda error: isinstance(error, StuckError))
    return actual


def run_ranks_or_raise(size: int, work: Callable[[int, ThreadP2P], T]) -> list[T]:
    """Run ``work`` on all ranks at the same time. Return the results, or raise the first error."""
    actual = run_ranks(size, work)
    for outcome in actual:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.value for outcome in actual]
