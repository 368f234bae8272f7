"""The order of a rank's reads of file ranges that other ranks of its host may read, too.

:mod:`rankless.engine.io.read`, ``read_shared`` and ``read_mapped`` order the requests of one rank with it. The order
only costs or saves time: ranks need not agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

#: Requests in a window, where each rank begins at a different one: few enough to stay in the page cache until all ranks
#: have read them.
WINDOW = 16

#: The fractional parts of its multiples are spread evenly between 0 and 1, for any number of multiples.
_GOLDEN = 0.6180339887

T = TypeVar("T")


def rotate_by_rank(requests: Sequence[T], rank: int) -> Iterator[T]:
    """Yield the requests in an order of the rank's own, so that ranks with the same requests share the reading.

    If all had one order, they would all wait for the same page of the disk. For example, rank 0 begins with request 0
    of 16, and rank 1 with request 9.
    """
    for start in range(0, len(requests), WINDOW):
        window = requests[start : start + WINDOW]
        first = int(rank * _GOLDEN % 1 * len(window))
        yield from (*window[first:], *window[:first])
