"""How ranks that hold the same bytes divide the work on them: equal shares, large neighbouring pieces."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence

from holdfast.engine.plan.file_ranges import FileRange

#: Where a piece is, in bytes.
Position = Callable[[FileRange], int]

#: Holders of one run do not split it into pieces smaller than this, in bytes; whole sectors.
MIN_SHARE = 2**20


def partition_file(piece: FileRange) -> int:
    """By its place in the file, for direct writes."""
    return piece.offset


def partition_tensor(piece: FileRange) -> int:
    """By its place in the tensor, so that no element is cut wherever it lies in a file."""
    return piece.start


def split_evenly(
    pieces: Sequence[FileRange], part: int, parts: int, position: Position = partition_file
) -> Sequence[FileRange]:
    """The ``part``-th of ``parts`` shares of some pieces: neighbours in their files, about equally many bytes.

    A cut inside a piece leaves at least :data:`MIN_SHARE` bytes on both sides and falls on a multiple of it by
    ``position``.
    """
    if parts == 1 or not pieces:
        return pieces
    ends = list(itertools.accumulate(piece.stop - piece.start for piece in pieces))
    low, high = (_cut(pieces, ends, one, parts, position) for one in (part, part + 1))
    first = bisect.bisect_right(ends, low)
    result = []
    for piece, end in zip(pieces[first:], ends[first:], strict=True):
        size = piece.stop - piece.start
        start = end - size
        if start >= high:
            break
        skip, keep = max(low - start, 0), min(high - start, size)
        result.append(piece.cut(skip, keep - skip))
    return result


def _cut(pieces: Sequence[FileRange], ends: Sequence[int], part: int, parts: int, position: Position) -> int:
    """Where the shares before ``part`` end, in bytes over all pieces."""
    ideal = ends[-1] * part // parts
    at = bisect.bisect_right(ends, ideal)
    if at == len(pieces):
        return ends[-1]
    size = pieces[at].stop - pieces[at].start
    start = ends[at] - size
    first = position(pieces[at])
    inside = (first + ideal - start) // MIN_SHARE * MIN_SHARE - first
    if inside < MIN_SHARE:
        return start
    return start + inside if size - inside >= MIN_SHARE else ends[at]
