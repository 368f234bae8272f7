"""Copies of many equal pieces of a shard at equal distances, as one strided copy.

:mod:`rankless.engine.io.copy_exchange` packs and unpacks the messages of a live copy with it, on each rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from rankless.engine.io.tensor_bytes import TensorBytes
from rankless.storage.aligned_memory import Bytes

#: The most bytes of a shard that are copied into memory to reach pieces in it that have no memory of their own.
_MOST_SPAN = 4 * 2**20


class Pieces(NamedTuple):
    """Pieces of a shard: ``number`` of them, each of ``size`` bytes, the first at byte ``start``, one each ``step``."""

    start: int
    size: int
    number: int = 1
    step: int = 0

    @property
    def span(self) -> int:
        """The number of bytes from the first piece's start to the last one's end."""
        return (self.number - 1) * self.step + self.size


def gather_pieces(shard: TensorBytes, pieces: Pieces, into: Bytes) -> None:
    """Copy pieces of a shard one after another ``into`` memory of their total size."""
    if pieces.number == 1:
        shard.copy_out(pieces.start, into)
        return
    for part, done in _split_span(shard, pieces):
        span = shard.view(part.start, part.start + part.span)
        if span is None:
            span = np.empty(part.span, np.uint8)
            shard.copy_out(part.start, span)
        packed = into[done : done + part.size * part.number].reshape(part.number, part.size)
        np.copyto(packed, _rows(span, part))


def scatter_pieces(shard: TensorBytes, pieces: Pieces, data: Bytes) -> None:
    """Copy ``data`` into pieces of a shard."""
    if pieces.number == 1:
        shard.write(pieces.start, data)
        return
    for part, done in _split_span(shard, pieces):
        packed = data[done : done + part.size * part.number].reshape(part.number, part.size)
        span = shard.view(part.start, part.start + part.span)
        if span is not None:
            np.copyto(_rows(span, part), packed)
            continue
        span = np.empty(part.span, np.uint8)
        shard.copy_out(part.start, span)  # what lies between the pieces stays as it is
        np.copyto(_rows(span, part), packed)
        shard.write(part.start, span)


def _split_span(shard: TensorBytes, pieces: Pieces) -> Iterator[tuple[Pieces, int]]:
    """Yield parts to be copied as spans, if the shard cannot be accessed in place; and the bytes before each."""
    count = pieces.number
    if shard.view(0, 0) is None:
        count = max(1, (_MOST_SPAN - pieces.size) // pieces.step + 1)
    for first in range(0, pieces.number, count):
        part = pieces._replace(start=pieces.start + first * pieces.step, number=min(count, pieces.number - first))
        yield part, first * pieces.size


def _rows(span: Bytes, pieces: Pieces) -> Bytes:
    """Return the pieces as rows. ``span`` starts with the first one and ends with the last one."""
    shape, strides = (pieces.number, pieces.size), (pieces.step, 1)
    rows: Bytes = np.lib.stride_tricks.as_strided(span, shape, strides)
    return rows
