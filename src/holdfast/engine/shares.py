"""How ranks that hold the same bytes divide the work on them: equal shares, large neighbouring pieces."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence

from holdfast.engine.transfer import Piece

#: Where a piece is, in bytes.
Position = Callable[[Piece], int]

#: Holders of one run do not split it into pieces smaller than this, in bytes; whole sectors.
SMALLEST = 2**20


def in_file(piece: Piece) -> int:
    """By its place in the file, for direct writes."""
    return piece.offset


def in_tensor(piece: Piece) -> int:
    """By its place in the tensor, so that no element is cut wherever it lies in a file."""
    return piece.start


def split_evenly(pieces: Sequence[Piece], part: int, parts: int, position: Position = in_file) -> Sequence[Piece]:
    """The ``part``-th of ``parts`` shares of some pieces: neighbours in their files, about equally many bytes.

    A cut inside a piece leaves at least :data:`SMALLEST` bytes on both sides and falls on a multiple of it by
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


def _cut(pieces: Sequence[Piece], ends: Sequence[int], part: int, parts: int, position: Position) -> int:
    """Where the shares before ``part`` end, in bytes over all pieces."""
    ideal = ends[-1] * part // parts
    at = bisect.bisect_right(ends, ideal)
    if at == len(pieces):
        return ends[-1]
    size = pieces[at].stop - pieces[at].start
    start = ends[at] - size
    first = position(pieces[at])
    inside = (first + ideal - start) // SMALLEST * SMALLEST - first
    if inside < SMALLEST:
        return start
    return start + inside if size - inside >= SMALLEST else ends[at]
