"""How ranks that hold the same bytes divide the work on them: equal shares, large neighbouring pieces."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

from holdfast.engine.transfer import Piece

#: Holders of one run do not split it into pieces smaller than this, in bytes; whole sectors.
SMALLEST = 2**20


def split_evenly(pieces: Sequence[Piece], part: int, parts: int) -> Sequence[Piece]:
    """The ``part``-th of ``parts`` shares of some pieces: neighbours in their files, about equally many bytes.

    A cut inside a piece leaves at least :data:`SMALLEST` bytes on both sides and falls on a multiple of it in the file.
    """
    if parts == 1 or not pieces:
        return pieces
    ends = list(itertools.accumulate(piece.stop - piece.start for piece in pieces))
    low, high = _cut(pieces, ends, part, parts), _cut(pieces, ends, part + 1, parts)
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


def _cut(pieces: Sequence[Piece], ends: Sequence[int], part: int, parts: int) -> int:
    """Where the shares before ``part`` end, in bytes over all pieces."""
    ideal = ends[-1] * part // parts
    at = bisect.bisect_right(ends, ideal)
    if at == len(pieces):
        return ends[-1]
    size = pieces[at].stop - pieces[at].start
    start = ends[at] - size
    inside = (pieces[at].offset + ideal - start) // SMALLEST * SMALLEST - pieces[at].offset
    if inside < SMALLEST:
        return start
    return start + inside if size - inside >= SMALLEST else ends[at]
