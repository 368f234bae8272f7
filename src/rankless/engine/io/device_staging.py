"""Staging out of accelerators: the devices copy into the staging memory, and no thread of the process moves a byte.

All copies are enqueued at the call, also copies of tensors that may be copied later: the next step waits for them on
the device, and the caller for nothing. Kernels that are not part of a step, or that run on other streams, can come
between. Therefore some chunks are copied once more before all others and before anything that the caller enqueues next,
and once after them; the three copies must be equal.

:func:`~rankless.engine.io.staging.stage_tensors` makes one on each rank, in the thread of the caller. The background
thread of an overlapped save waits for it. The first samples must be enqueued before the call returns, and the second
ones after all copies: otherwise a change in between is not found.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import numpy as np

from rankless.engine.io.copies_from_device import CopyMark, CopyPiece, DeviceCopies
from rankless.engine.io.device_streams import CopyStream, wait_for_copies
from rankless.engine.io.pinned_memory import pin_for
from rankless.engine.io.requests import ShardOf
from rankless.engine.io.staging_memory import Arena, StagingMemory
from rankless.engine.io.torn_snapshot import SAMPLED_CHUNKS, StagedChunk, torn_error
from rankless.engine.plan.file_ranges import CHUNK
from rankless.errors import DeviceError
from rankless.observe.spans import span
from rankless.storage.aligned_memory import Bytes

#: The memory of samples. It is kept from save to save, because it is pinned.
_sample_memory = StagingMemory()


class _Sample(NamedTuple):
    """A chunk, and copies of it that were made before and after the one that is saved."""

    staged: StagedChunk
    before: Bytes
    after: Bytes


class DeviceStaging:
    """The copies of one save out of accelerators. It does nothing if there are no ``streams``."""

    def __init__(self, streams: Sequence[CopyStream], shard_of: ShardOf) -> None:
        self.streams, self._shard_of = streams, shard_of
        self._samples: Sequence[_Sample] = ()
        self._sample_arena = Arena(_sample_memory)
        self._mark = CopyMark(())

    def enqueue(
        self,
        memory: Bytes,
        chunks: Sequence[StagedChunk],
        deferred: Sequence[StagedChunk],
        sampled: Sequence[StagedChunk],
    ) -> None:
        """Enqueue the copies of chunks into ``memory``, and of the ``sampled`` ones of those that are deferred.

        Kernels that the calling thread enqueues next wait for the copies and the first samples, but not for the
        ``deferred``.
        """
        if not self.streams:
            return
        copies = DeviceCopies(self.streams)
        self._samples, sample_memory = self._allocate_samples(sampled, sum(chunk.chunk.size for chunk in deferred))
        copies.enqueue(self._sample_pieces(lambda sample: sample.before, sample_memory), sample_memory)
        copies.enqueue(self._pieces(chunks, memory), memory)
        copies.mark().precede_caller()
        copies.enqueue(self._pieces(deferred, memory), memory)
        copies.enqueue(self._sample_pieces(lambda sample: sample.after, sample_memory), sample_memory)
        self._mark = copies.mark()

    def precede_caller(self) -> None:
        """Let all copies run before the kernels that the calling thread enqueues next on its current streams."""
        self._mark.precede_caller()

    def wait(self) -> None:
        """Wait until all copies are done. Raises ``DeviceError``."""
        if self.streams:
            with span("wait for copies of the device", "copy"):
                self._mark.wait()

    def finish(self, names: Sequence[tuple[str, str]]) -> None:
        """Wait until all copies are done. Raises ``TornSnapshotError`` if a sampled chunk has changed meanwhile."""
        self.wait()
        for staged, before, after in self._samples:
            if not np.array_equal(before, staged.destination) or not np.array_equal(after, staged.destination):
                raise torn_error(staged.chunk, names)
        self._samples = ()
        self._sample_arena.release()

    @contextmanager
    def abandon_on_error(self) -> Iterator[None]:
        """Abandon the copies if the ``with`` block fails: other saves use the memory afterwards."""
        try:
            yield
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Wait until no device copies any more, whatever has happened."""
        with suppress(DeviceError):
            wait_for_copies(self.streams)  # also for what was enqueued before an error
        self._samples = ()
        self._sample_arena.release()

    def _allocate_samples(
        self, sampled: Sequence[StagedChunk], deferred_nbytes: int
    ) -> tuple[Sequence[_Sample], Bytes]:
        """Return the samples, and the memory of their copies."""
        if not sampled:
            return (), np.empty(0, np.uint8)
        sizes = [chunk.chunk.size for chunk in sampled]
        most = min(deferred_nbytes, SAMPLED_CHUNKS * CHUNK)  # as many in each save: the memory is used again
        memory = pin_for(self.streams, self._sample_arena.reserve_bytes(2 * most))
        stops = list(itertools.accumulate(sizes, initial=0))
        before, after = memory[: stops[-1]], memory[stops[-1] :]
        return [
            _Sample(chunk, before[start:stop], after[start:stop])
            for chunk, (start, stop) in zip(sampled, itertools.pairwise(stops), strict=True)
        ], memory

    def _sample_pieces(self, copy_of: Callable[[_Sample], Bytes], memory: Bytes) -> Iterator[CopyPiece]:
        return self._pieces((StagedChunk(sample.staged.chunk, copy_of(sample)) for sample in self._samples), memory)

    def _pieces(self, chunks: Iterable[StagedChunk], memory: Bytes) -> Iterator[CopyPiece]:
        for chunk, destination in chunks:
            offset = destination.ctypes.data - memory.ctypes.data - chunk.offset
            for tensor, start, stop, local, _, position in chunk.file_ranges:
                yield CopyPiece(self._shard_of(tensor), local, stop - start, offset + position)
