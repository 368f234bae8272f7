"""A rank's copy of the bytes that it published last: the next version is the difference to them.

:class:`~rankless.weights.publisher.WeightPublisher` has one on every rank; the thread that publishes reads it while it
encodes, and changes it only when the version is committed. So after a failed publication the copy still is that of the
last committed version.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rankless.engine.io.requests import ProviderOf
from rankless.engine.plan.file_ranges import FileRange, count_bytes, tensor_chunks
from rankless.ondisk.block_crcs import BLOCK_BYTES
from rankless.ondisk.weight_versions import VersionKey
from rankless.process.worker_threads import count_threads, run_in_threads
from rankless.storage.aligned_memory import Bytes, aligned_buffer


class PublishedCopy:
    """The bytes of a rank's file ranges in one version."""

    def __init__(self) -> None:
        self._key: VersionKey | None = None
        self._ranges: Sequence[FileRange] = ()
        self._starts: dict[tuple[int, int], int] = {}
        self._memory: Bytes = np.empty(0, np.uint8)

    def holds(self, key: VersionKey | None, file_ranges: Sequence[FileRange]) -> bool:
        """Return whether this is the copy of a version, of the same bytes of its files."""
        return key is not None and key == self._key and _places(file_ranges) == list(self._starts)

    def bytes_of(self, file_range: FileRange, whole: FileRange) -> Bytes:
        """Return the bytes of a part of a file range, ``whole``, that this holds."""
        start = self._starts[whole.file, whole.offset] + file_range.start - whole.start
        return self._memory[start : start + file_range.stop - file_range.start]

    def replace(self, key: VersionKey, file_ranges: Sequence[FileRange], bytes_of: ProviderOf) -> None:
        """Copy the bytes of another version. If that fails, the copy is of no version."""
        self._key = None
        if _places(file_ranges) != list(self._starts):
            self._memory = np.empty(0, np.uint8)  # free it first: both may not fit into memory
            self._starts, at = {}, 0
            for file_range in file_ranges:
                self._starts[file_range.file, file_range.offset] = at
                at += _aligned(file_range.stop - file_range.start)
            self._memory = aligned_buffer(at)
        whole = [(file_range, self._starts[file_range.file, file_range.offset]) for file_range in file_ranges]

        def copy(item: tuple[FileRange, int]) -> None:
            file_range, at = item
            for chunk in tensor_chunks([file_range], BLOCK_BYTES):
                (piece,) = chunk.file_ranges
                start = at + piece.start - file_range.start
                bytes_of(piece.tensor).copy_out(piece.local, self._memory[start : start + chunk.size])

        run_in_threads(copy, whole, count_threads(count_bytes(file_ranges)))
        self._key = key

    def forget(self) -> None:
        """Free the memory: the next version is published as a whole."""
        self._key, self._starts, self._memory = None, {}, np.empty(0, np.uint8)


def _places(file_ranges: Sequence[FileRange]) -> list[tuple[int, int]]:
    return [(file_range.file, file_range.offset) for file_range in file_ranges]


def _aligned(nbytes: int) -> int:
    """Return a size after which the next range begins at a multiple of 8 bytes."""
    return -(-nbytes // 8) * 8
