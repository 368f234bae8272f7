"""A rank's copy of the bytes that it published last: the next version is the difference to them.

:class:`~rankless.weights.publisher.WeightPublisher` has one on every rank; the thread that publishes reads it while it
encodes, and changes it only when the version is committed. So after a failed publication the copy still has the bytes
of the last committed version.

A rank without memory for the copy stores its words as they are.
"""

from __future__ import annotations

import os
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
        self._process = os.getpid()
        self._starts: dict[tuple[int, int, int], int] = {}
        self._memory: Bytes = np.empty(0, np.uint8)

    def holds(self, key: VersionKey | None, file_ranges: Sequence[FileRange]) -> bool:
        """Return whether this is the copy of a version, of the same bytes of its files."""
        return key is not None and key == self._key and os.getpid() == self._process and self._has(file_ranges)

    def bytes_of(self, file_range: FileRange, whole: FileRange) -> Bytes:
        """Return the bytes of a part of a file range, ``whole``, that this holds."""
        start = self._starts[_place(whole)] + file_range.start - whole.start
        return self._memory[start : start + file_range.stop - file_range.start]

    def _has(self, file_ranges: Sequence[FileRange]) -> bool:
        return list(map(_place, file_ranges)) == list(self._starts)

    def replace(self, key: VersionKey, file_ranges: Sequence[FileRange], bytes_of: ProviderOf) -> None:
        """Copy the bytes of another version. If that fails, the copy is of no version.

        A forked process does not have the memory of its parent: it begins anew.
        """
        is_kept = self._has(file_ranges) and os.getpid() == self._process
        self._key = None
        if not is_kept:
            self.forget()  # free the memory first: both may not fit
            starts, at = {}, 0
            for file_range in file_ranges:
                starts[_place(file_range)] = at
                at += _aligned(file_range.stop - file_range.start)
            self._memory, self._starts, self._process = aligned_buffer(at), starts, os.getpid()

        def copy(file_range: FileRange) -> None:
            at = self._starts[_place(file_range)]
            for chunk in tensor_chunks([file_range], BLOCK_BYTES):
                (piece,) = chunk.file_ranges
                start = at + piece.start - file_range.start
                bytes_of(piece.tensor).copy_out(piece.local, self._memory[start : start + chunk.size])

        run_in_threads(copy, file_ranges, count_threads(count_bytes(file_ranges)))
        self._key = key

    def forget(self) -> None:
        """Free the memory: the next version is published as a whole."""
        self._key, self._starts, self._memory = None, {}, np.empty(0, np.uint8)


def _place(file_range: FileRange) -> tuple[int, int, int]:
    """Return the fields that two ranges must have in common to have the same bytes of the files."""
    return file_range.file, file_range.offset, file_range.stop - file_range.start


def _aligned(nbytes: int) -> int:
    """Return a size, padded so that the next range begins at a multiple of 8 bytes. For example, 16 for 9 bytes."""
    return -(-nbytes // 8) * 8
