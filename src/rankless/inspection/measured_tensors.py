"""The statistics of tensors, computed from slices of them while the next slices are read.

:mod:`rankless.inspection.checkpoint_statistics` calls it, in one process, which reads in several threads. Parts are
merged in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, islice
from queue import SimpleQueue

from rankless.engine.plan.element_ranges import TensorRange
from rankless.inspection.bits_to_floats import Bits
from rankless.inspection.inspected_checkpoint import InspectedCheckpoint
from rankless.inspection.partial_statistics import PartialStatistics, Scratch, measure_part
from rankless.inspection.read_elements import TensorSide, split_segments
from rankless.inspection.tensor_statistics import TensorStatistics
from rankless.process.worker_threads import THREADS, run_in_threads

#: The number of slices per read: up to 128 MiB.
_SLICES = 32

#: A slice, and the elements in it.
_ReadSlice = tuple[Sequence[TensorRange], Bits]


def measure_tensors(
    inspected: InspectedCheckpoint, keys: Sequence[tuple[str, str]], done: Callable[[int], None]
) -> list[TensorStatistics]:
    """Return the statistics of each tensor. ``done`` is called with the number of bytes that were read.

    Raises ``CorruptCheckpointError`` if bytes do not match their checksums.
    """
    return _Measurement(TensorSide(inspected, keys)).measure(done)


class _Measurement:
    """The statistics of some tensors of a checkpoint, as far as they were read."""

    def __init__(self, side: TensorSide) -> None:
        self._side = side
        self._totals = [PartialStatistics() for _ in side.infos]
        #: The slices that were read last, and are not measured yet.
        self._read: list[_ReadSlice] = []
        #: The memory that no thread uses now.
        self._scratch = SimpleQueue[Scratch]()
        for _ in range(THREADS):
            self._scratch.put(Scratch())

    def measure(self, done: Callable[[int], None]) -> list[TensorStatistics]:
        """Read all slices, and return the statistics of each tensor."""
        infos = self._side.infos
        slices = split_segments([math.prod(info.shape) for info in infos], [(info.dtype,) for info in infos])
        while (batch := list(islice(slices, _SLICES))) or self._read:
            measuring = self._read
            tasks = [partial(self._read_slices, batch), *(partial(self._measure_slice, read) for read in measuring)]
            _, *measured = run_in_threads(lambda task: task(), tasks)
            for (segments, _), parts in zip(measuring, measured, strict=True):
                for segment, part in zip(segments, parts, strict=True):
                    self._totals[segment.tensor].merge(part)
            done(sum(bits.nbytes for _, bits in measuring))
        self._side.verify_partial_blocks()
        return [total.summarize() for total in self._totals]

    def _read_slices(self, batch: Sequence[Sequence[TensorRange]]) -> list[PartialStatistics]:
        self._read = list(zip(batch, self._side.read_slices(batch), strict=True))
        return []

    def _measure_slice(self, read: _ReadSlice) -> list[PartialStatistics]:
        segments, bits = read
        dtype = self._side.infos[segments[0].tensor].dtype
        starts = accumulate((segment.size for segment in segments), initial=0)
        scratch = self._scratch.get()
        parts = [
            measure_part(bits[start : start + segment.size], dtype, scratch)
            for segment, start in zip(segments, starts, strict=False)
        ]
        self._scratch.put(scratch)
        return parts
