"""The order of training data: which samples make up each global batch, epoch after epoch. Pure functions, no I/O.

A position counts samples over all ranks, as Megatron-LM's ``consumed_samples`` does. The order of an epoch depends only
on the seed and the epoch. So any number of ranks can continue from any position, with batches of any size.

:class:`~rankless.data.resumable_loader.ResumableLoader` asks it on each rank. The order of samples and the state are
stored: all ranks, and all versions, must get the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Indices of samples.
Samples = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SchedulePosition:
    """A position in the schedule: ``consumed`` samples of ``epoch`` were used, counted over all ranks."""

    epoch: int = 0
    consumed: int = 0


@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """A division of the samples ``[0, length)`` into global batches of ``batch`` samples.

    If the last batch of an epoch is not full, it is completed with the first samples of the next epoch. With
    ``drop_last`` it is left out. For example, 10 samples in batches of 4: the third batch has the last two samples, and
    two of the next epoch.
    """

    length: int
    batch: int
    shuffle: bool
    seed: int
    drop_last: bool

    def epoch_order(self, epoch: int) -> Samples:
        """Return the sample indices in the order of an epoch: 8 bytes each."""
        if not self.shuffle:
            return np.arange(self.length)
        # The stream of this generator is frozen (NEP 19): an upgrade of NumPy does not change the order.
        key = [self.seed & 0xFFFFFFFF, self.seed >> 32, epoch]
        return np.random.RandomState(key).permutation(self.length)

    def next_start(self, at: SchedulePosition) -> SchedulePosition:
        """Return the position where the next batch starts: ``at``, or the start of the next epoch."""
        if self.drop_last and at.consumed + self.batch > self.length:
            return SchedulePosition(at.epoch + 1)
        return at

    def position_after(self, at: SchedulePosition) -> SchedulePosition:
        """Return the position after the batch that starts at ``at``."""
        epochs, consumed = divmod(at.consumed + self.batch, self.length)
        return self.next_start(SchedulePosition(at.epoch + epochs, consumed))

    def batches_from(self, at: SchedulePosition) -> Iterator[tuple[SchedulePosition, Samples]]:
        """Yield the global batches that start in the epoch of ``at``, from there on, each with its position."""
        epoch, order = at.epoch, self.epoch_order(at.epoch)
        while at.epoch == epoch:
            batch = order[at.consumed : at.consumed + self.batch]
            yield at, batch if len(batch) == self.batch else self._pad_batch(batch, epoch)
            at = self.position_after(at)

    def _pad_batch(self, batch: Samples, epoch: int) -> Samples:
        while len(batch) < self.batch:
            epoch += 1
            batch = np.concatenate([batch, self.epoch_order(epoch)[: self.batch - len(batch)]])
        return batch

    def count_batches(self) -> int:
        """Return the number of batches of an epoch, counted from its first sample.

        For example, 10 samples are 3 batches of 4, or 2 with ``drop_last``.
        """
        return self.length // self.batch if self.drop_last else -(-self.length // self.batch)

    def to_state(self, at: SchedulePosition) -> dict[str, Any]:
        """Return a position, and all that the order depends on, as plain values."""
        order_settings = {"length": self.length, "shuffle": self.shuffle, "seed": self.seed}
        return {"epoch": at.epoch, "consumed": at.consumed, **order_settings}

    def resume_from(self, state: dict[str, Any]) -> tuple[BatchSchedule, SchedulePosition]:
        """Return the schedule in the order of a :meth:`to_state`, and the position in it."""
        schedule = replace(self, shuffle=state["shuffle"], seed=state["seed"])
        return schedule, schedule.next_start(SchedulePosition(state["epoch"], state["consumed"]))
