"""The course of training data: which samples make up each global batch, epoch after epoch. Pure.

A position counts samples over all ranks, as Megatron-LM's ``consumed_samples`` does, and the order of an epoch depends
on the seed and the epoch alone. So any number of ranks goes on from any position, with batches of any size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Numbers of samples.
Samples = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SchedulePosition:
    """``consumed`` samples of an epoch, over all ranks, are behind."""

    epoch: int = 0
    consumed: int = 0


@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """Samples ``[0, length)`` in global batches of ``batch`` samples.

    A batch that an epoch cannot fill is filled up with the first samples of the next one; with ``drop_last`` it is
    left out.
    """

    length: int
    batch: int
    shuffle: bool
    seed: int
    drop_last: bool

    def order(self, epoch: int) -> Samples:
        """The samples in the order of an epoch: 8 bytes each."""
        if not self.shuffle:
            return np.arange(self.length)
        # The stream of this generator is frozen (NEP 19): an epoch goes on as it began after any upgrade.
        key = [self.seed & 0xFFFFFFFF, self.seed >> 32, epoch]
        return np.random.RandomState(key).permutation(self.length)

    def begin(self, at: SchedulePosition) -> SchedulePosition:
        """Where the next batch begins: at ``at``, or after what is left out there."""
        if self.drop_last and at.consumed + self.batch > self.length:
            return SchedulePosition(at.epoch + 1)
        return at

    def after(self, at: SchedulePosition) -> SchedulePosition:
        """The position after the batch that begins at ``at``."""
        epochs, consumed = divmod(at.consumed + self.batch, self.length)
        return self.begin(SchedulePosition(at.epoch + epochs, consumed))

    def rest(self, at: SchedulePosition) -> Iterator[tuple[SchedulePosition, Samples]]:
        """The global batches that begin in the epoch of ``at``, from there on, and where each begins."""
        epoch, order = at.epoch, self.order(at.epoch)
        while at.epoch == epoch:
            batch = order[at.consumed : at.consumed + self.batch]
            yield at, batch if len(batch) == self.batch else self._filled_up(batch, epoch)
            at = self.after(at)

    def _filled_up(self, batch: Samples, epoch: int) -> Samples:
        while len(batch) < self.batch:
            epoch += 1
            batch = np.concatenate([batch, self.order(epoch)[: self.batch - len(batch)]])
        return batch

    def batches(self) -> int:
        """How many batches an epoch has that begins with its first sample."""
        return self.length // self.batch if self.drop_last else -(-self.length // self.batch)

    def state(self, at: SchedulePosition) -> dict[str, Any]:
        """A position, with all that the order depends on, as plain values."""
        own = {"length": self.length, "shuffle": self.shuffle, "seed": self.seed}
        return {"epoch": at.epoch, "consumed": at.consumed, **own}

    def resumed(self, state: dict[str, Any]) -> tuple[BatchSchedule, SchedulePosition]:
        """The course in the order of a :meth:`state`, and the position in it."""
        course = replace(self, shuffle=state["shuffle"], seed=state["seed"])
        return course, course.begin(SchedulePosition(state["epoch"], state["consumed"]))
