"""The parts of a generation that one process holds, as one memory: the source of the bytes of a drain.

:mod:`rankless.save.generation_content` makes one on each rank, in the vote "preparing the drain".
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import numpy as np

from rankless.engine.plan.file_ranges import FileRange
from rankless.storage.aligned_memory import Bytes
from rankless.tier.part import PartTable


class HeldParts:
    """Parts, each with its mapped bytes. ``file_ranges`` are their ranges in the order of the files.

    The ``local`` of a range is its place among the bytes of all parts, one part after another.
    """

    slice_bytes = 256 * 2**10

    def __init__(self, tables: Mapping[int, PartTable], memory: Mapping[int, Bytes]) -> None:
        self._starts, self._memory = list[int](), list(memory.values())
        file_ranges, start = list[FileRange](), 0
        for part, mapped in memory.items():
            self._starts.append(start)
            for file_range, _ in tables[part].rows.iter_ranges():
                file_ranges.append(file_range._replace(local=file_range.local + start))
            start += len(mapped)
        self.file_ranges: Sequence[FileRange] = sorted(file_ranges, key=lambda one: (one.file, one.offset))

    def view(self, start: int, stop: int) -> Bytes:
        """Return bytes ``[start, stop)``, which are of one part."""
        number = bisect_right(self._starts, start) - 1
        first = self._starts[number]
        return self._memory[number][start - first : stop - first]

    def copy_out(self, start: int, into: Bytes) -> None:
        """Fill ``into`` with the bytes from ``start`` on."""
        np.copyto(into, self.view(start, start + len(into)))
