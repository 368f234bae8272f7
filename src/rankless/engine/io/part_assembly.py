"""Assembly of one part of a file that is uploaded: large ranges stay in the memory of their tensors.

Small ranges are copied into a buffer. So are ranges of tensors that cannot send bytes from their own memory. Each byte
is hashed once: the CRC of the part is combined from the CRCs of its ranges.

:mod:`rankless.engine.io.upload_parts` fills one for each part that this rank sends, in one of its sending threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from rankless.engine.io.received_messages import ReceivedRun
from rankless.engine.io.requests import ByteProvider
from rankless.engine.io.write import copy_and_hash
from rankless.engine.plan.file_ranges import FileRange, split_at_blocks
from rankless.errors import StateError
from rankless.ondisk.block_crcs import Fragment, combine_crcs, crc64
from rankless.storage.aligned_memory import Bytes
from rankless.storage.body import Body

#: The fewest bytes that are sent from where they are. Fewer are copied sooner than they are passed to the system.
_MIN_IN_PLACE = 64 * 2**10


class _HashedRange(NamedTuple):
    """Bytes of the part: their offset in it, their size, their CRC, and their memory unless it is the buffer."""

    offset: int
    nbytes: int
    crc: int
    memory: Bytes | None


class PartAssembly:
    """The bytes of a part. ``start`` is its offset in the file, and ``buffer`` has its size.

    Large ranges stay where they are. So they must not change before the body is sent.
    """

    def __init__(self, start: int, buffer: Bytes) -> None:
        self._start, self._buffer = start, buffer
        self._ranges: list[_HashedRange] = []

    def add_range(self, file_range: FileRange, source: ByteProvider) -> Iterator[tuple[int, Fragment]]:
        """Add bytes of a tensor, and yield their fragments."""
        for piece in split_at_blocks(file_range):
            nbytes = piece.stop - piece.start
            memory = source.view(piece.local, piece.local + nbytes) if nbytes >= _MIN_IN_PLACE else None
            if memory is None:
                crc = copy_and_hash(self._slice(piece.offset, nbytes), source, piece.local)
            else:
                crc = crc64(memory)
            self._ranges.append(_HashedRange(piece.offset - self._start, nbytes, crc, memory))
            yield piece.tensor, Fragment(piece.start, piece.stop, crc)

    def add_run(self, run: ReceivedRun) -> None:
        """Add bytes that other ranks have passed on."""
        memory = run.data if len(run.data) >= _MIN_IN_PLACE else None
        if memory is None:
            self._slice(run.start, len(run.data))[:] = run.data
        self._ranges.append(_HashedRange(run.start - self._start, len(run.data), crc64(run.data), memory))

    def add_known(self, offset: int, data: bytes) -> None:
        """Add bytes that belong to no tensor. ``offset`` is that in the file."""
        self._slice(offset, len(data))[:] = np.frombuffer(data, np.uint8)
        self._ranges.append(_HashedRange(offset - self._start, len(data), crc64(data), None))

    def check_complete(self) -> None:
        """Raise ``StateError`` if bytes of the part are missing."""
        ordered = self._order_ranges()
        ends = [0, *(hashed.offset + hashed.nbytes for hashed in ordered)]
        if ends != [*(hashed.offset for hashed in ordered), len(self._buffer)]:
            raise StateError(f"not all bytes from {self._start} on were assembled: this is a bug of rankless")

    def make_body(self) -> Body:
        """Return all bytes of the part, in order."""
        ordered = self._order_ranges()
        return Body(tuple(self._join(ordered)), combine_crcs((hashed.crc, hashed.nbytes) for hashed in ordered))

    def _join(self, ordered: list[_HashedRange]) -> Iterator[memoryview]:
        """Yield the memory of the ranges, and the parts of the buffer between them."""
        copied_from = 0
        for hashed in ordered:
            if hashed.memory is not None:
                if copied_from < hashed.offset:
                    yield self._buffer[copied_from : hashed.offset].data
                yield hashed.memory.data
                copied_from = hashed.offset + hashed.nbytes
        if copied_from < len(self._buffer):
            yield self._buffer[copied_from:].data

    def _order_ranges(self) -> list[_HashedRange]:
        return sorted((hashed for hashed in self._ranges if hashed.nbytes), key=lambda hashed: hashed.offset)

    def _slice(self, offset: int, nbytes: int) -> Bytes:
        return self._buffer[offset - self._start : offset - self._start + nbytes]
