"""In which order a rank reads what other ranks of its host may read, too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

#: Requests among which each rank begins at another one: few enough to stay in the page cache until all have read them.
WINDOW = 16

#: Multiples of it, less their whole parts, lie evenly between 0 and 1, however many follow one another.
_GOLDEN = 0.6180339887

T = TypeVar("T")


def rotate_by_rank(requests: Sequence[T], rank: int) -> Iterator[T]:
    """The requests in an order of the rank's own, in which ranks that read the same share the reading.

    In one order for all of them, they would wait together for the page that comes next from the disk.
    """
    for start in range(0, len(requests), WINDOW):
        window = requests[start : start + WINDOW]
        first = int(rank * _GOLDEN % 1 * len(window))
        yield from (*window[first:], *window[:first])
