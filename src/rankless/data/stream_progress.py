"""The progress in a stream of shards: the rest of it, and which rank reads which shard. Pure functions, no I/O.

A stream consists of shards. Each is read from its begin. Epoch after epoch each shard is read once, by one rank. A rank
notes for each of its shards how far its training has used the samples. The notes of all ranks together give the rest,
and that is divided over any number of ranks: :func:`join`. For example, two ranks have used 3 and 5 samples of a shard
each; a single rank then reads both shards on from there.

:class:`~rankless.data.stream_loader.StreamLoader` asks it on each rank. Which rank reads which shard follows from the
states alone: no message is sent. The states are stored. All ranks must get the same division from the same states: no
clock, and no random numbers but the seed's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rankless.errors import MismatchError

#: An epoch, and the number of a shard.
Shard = tuple[int, int]


@dataclass
class ShardProgress:
    """The samples of a shard that were used: all before ``next``, and some ``ahead`` of it, in a shuffled order.

    ``length`` is the number of its samples once it was read to its end, else ``None``.
    """

    next: int = 0
    ahead: set[int] = field(default_factory=set)
    length: int | None = None

    @property
    def is_finished(self) -> bool:
        """True if all samples were used."""
        return self.next == self.length

    def note_used(self, sample: int) -> None:
        """Note that a sample was used."""
        self.ahead.add(sample)
        while self.next in self.ahead:
            self.ahead.remove(self.next)
            self.next += 1

    def copy(self) -> ShardProgress:
        """Return a copy."""
        return ShardProgress(self.next, set(self.ahead), self.length)


#: The progress in a shard that is finished, and in one that was not begun. Nothing changes them.
FINISHED, NOT_BEGUN = ShardProgress(0, set(), 0), ShardProgress()


@dataclass
class StreamProgress:
    """The progress in a stream: all shards of epochs before ``epoch`` are finished, and some of others are begun."""

    epoch: int = 0
    shards: dict[Shard, ShardProgress] = field(default_factory=dict)

    def of(self, shard: Shard) -> ShardProgress:
        """Return the progress in a shard."""
        return FINISHED if shard[0] < self.epoch else self.shards.get(shard, NOT_BEGUN)

    def copy(self) -> StreamProgress:
        """Return a copy."""
        return StreamProgress(self.epoch, {shard: progress.copy() for shard, progress in self.shards.items()})

    def begin_epoch(self, epoch: int) -> None:
        """Note that all shards of earlier epochs are finished."""
        self.epoch = epoch
        self.shards = {shard: progress for shard, progress in self.shards.items() if shard[0] >= epoch}

    def to_state(self) -> dict[str, Any]:
        """Return plain values: of each epoch the finished shards as the bits of a number, and rows of those begun."""
        finished: dict[int, list[int]] = {}
        begun = []
        for (epoch, number), progress in self.shards.items():
            if progress.is_finished:
                finished.setdefault(epoch, []).append(number)
            elif progress.next or progress.ahead or progress.length is not None:
                length = -1 if progress.length is None else progress.length
                begun.append([epoch, number, progress.next, length, sorted(progress.ahead)])
        texts = [[epoch, _to_bits(numbers)] for epoch, numbers in sorted(finished.items())]
        return {"epoch": self.epoch, "finished": texts, "begun": sorted(begun)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> StreamProgress:
        """Return the progress of :meth:`to_state`."""
        shards = {
            (epoch, number): ShardProgress(begun, set(ahead), None if length < 0 else length)
            for epoch, number, begun, length, ahead in state["begun"]
        }
        for epoch, text in state["finished"]:
            shards |= dict.fromkeys(((epoch, number) for number in _from_bits(text)), FINISHED)
        return cls(state["epoch"], shards)


def _to_bits(numbers: Sequence[int]) -> str:
    bits = np.zeros(max(numbers) + 1, bool)
    bits[numbers] = True
    return np.packbits(bits).tobytes().hex()


def _from_bits(text: str) -> list[int]:
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8))
    numbers: list[int] = np.flatnonzero(bits).tolist()
    return numbers


@dataclass(frozen=True)
class StreamPlan:
    """The order of a stream: the number of its shards, and the seed of their order if they are shuffled."""

    count: int
    seed: int
    shuffle: bool

    def order(self, epoch: int) -> Sequence[int]:
        """Return the shards in the order of an epoch."""
        if not self.shuffle:
            return range(self.count)
        # The stream of this generator is frozen (NEP 19): an upgrade of NumPy does not change the order.
        key = [self.seed & 0xFFFFFFFF, self.seed >> 32, epoch]
        numbers: list[int] = np.random.RandomState(key).permutation(self.count).tolist()
        return numbers

    def assign_epoch(self, base: StreamProgress, epoch: int, rank: int, size: int) -> list[Shard]:
        """Return the shards of an epoch that a rank of ``size`` reads, if all ranks go on from ``base``.

        In each epoch another rank is the first one, so that none always gets one shard more.
        """
        return _of_rank(self.list_left(base, epoch), epoch, rank, size)

    def list_left(self, base: StreamProgress, epoch: int) -> list[Shard]:
        """Return the shards of an epoch that are not finished, in its order."""
        return [(epoch, number) for number in self.order(epoch) if not base.of((epoch, number)).is_finished]

    def join(self, base: StreamProgress, parts: Sequence[StreamProgress]) -> StreamProgress:
        """Return the progress of all ranks together. ``parts`` are the ranks' own, which went on from ``base``."""
        joined = base.copy()
        for part in parts:
            joined.shards |= {shard: known for shard, known in part.copy().shards.items() if shard[0] >= part.epoch}
        for epoch in range(base.epoch, max(part.epoch for part in parts)):
            left = self.list_left(base, epoch)
            for rank, part in enumerate(parts):
                if epoch < part.epoch:
                    joined.shards |= dict.fromkeys(_of_rank(left, epoch, rank, len(parts)), FINISHED)
        epoch = base.epoch
        while all(joined.of((epoch, number)).is_finished for number in range(self.count)):
            epoch += 1
        joined.begin_epoch(epoch)
        return joined


def _of_rank(left: Sequence[Shard], epoch: int, rank: int, size: int) -> list[Shard]:
    return list(left[(rank + epoch) % size :: size])


def select_one_of_each_rank(states: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the states of the ranks that share a stream, by rank: ranks that get the same data have the same state.

    Raises ``MismatchError`` if these differ, or if the state of a rank is missing.
    """
    by_rank: dict[int, Mapping[str, Any]] = {}
    for state in states:
        known = by_rank.setdefault(state["rank"], state)
        if known != state:
            raise MismatchError(f"two ranks have read as rank {state['rank']} of a stream, and were not equally far")
    size = next(iter(by_rank.values()))["size"]
    if missing := set(range(size)) - by_rank.keys():
        raise MismatchError(f"the position of rank {min(missing)} of {size} in the stream is missing")
    return [by_rank[rank] for rank in range(size)]
