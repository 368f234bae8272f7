"""Which rank handles which stripe, and which bytes go between ranks for it. Pure functions.

Every rank goes through the stripes that concern it in one and the same order, so that sends and receives
between two ranks meet, and the oldest stripe in flight never waits for a younger one.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from holdfast.engine.layouts import Coordinate
from holdfast.engine.membership import Held
from holdfast.engine.parts import Part, part
from holdfast.engine.runs import Run
from holdfast.engine.stripes import Share, is_narrow, share, stripes
from holdfast.engine.transfer import Piece

#: Where bytes ``[start, stop)`` of a tensor lie in files; ``local`` of the pieces counts from ``start``.
Locate = Callable[[int, int], Sequence[Piece]]


def is_striped(held: Held) -> bool:
    """Whether a tensor goes through stripes, judged by its first part, which has the longest runs."""
    return bool(held.division) and is_narrow(part(held.info, held.division, (0,) * len(held.division)))


def as_it_lies(mine: Part, locate: Locate) -> Iterator[Piece]:
    """The runs of a part, as they lie in files."""
    local = 0
    for start, stop in mine.runs():
        pieces = locate(start, stop)
        yield from (piece._replace(local=piece.local + local) for piece in pieces) if local else pieces
        local += stop - start


class Cut(NamedTuple):
    """What goes through a stripe of one part: ``size`` bytes from ``local`` on in the part.

    ``holders`` have them, and ``source`` is the nearest of these to the stripe's owner.
    """

    holders: tuple[int, ...]
    source: int
    local: int
    size: int


class Owned(NamedTuple):
    """A stripe that this rank puts together or takes apart: where it lies in files, and in it the cuts of all parts."""

    pieces: Sequence[Piece]
    cuts: tuple[tuple[Cut, Share], ...]


class Passed(NamedTuple):
    """A stripe that rank ``owner`` handles, with the cut of this rank's part."""

    tensor: int
    start: int
    owner: int
    cut: Cut


Crossing = Owned | Passed


class Routes:
    """The stripes that concern one rank. Ranks that hold the same tensors deal their stripes out in turn.

    ``holders`` tells the ranks that play a part for a part of a tensor.
    """

    def __init__(self, rank: int, holders: Callable[[Held, Coordinate], tuple[int, ...]] = Held.holders) -> None:
        self._rank, self._holders = rank, holders
        self._dealt: dict[tuple[int, ...], int] = {}

    def crossings(self, held: Held, locate: Locate) -> Iterator[Crossing]:
        """The stripes of a tensor that this rank owns, and those that its part has bytes in.

        To be asked for tensors in the order of their numbers, which all ranks know them by.
        """
        coordinate = held.coordinate(self._rank)
        if coordinate is None:
            return
        mine, peers = part(held.info, held.division, coordinate), self._holders(held, coordinate)
        candidates = held.everyone()
        for stripe in stripes(mine.shape):
            owner = self._deal(candidates)
            if owner == self._rank:
                yield Owned(locate(*stripe), tuple(self._all_cuts(held, stripe)))
            elif (cut := _cut(mine, stripe, peers, owner)) is not None:
                # As its owner knows it: by the stored tensor that the first byte is of.
                first = locate(stripe.start, stripe.start + 1)[0]
                yield Passed(first.tensor, first.start, owner, cut)

    def _all_cuts(self, held: Held, stripe: Run) -> Iterator[tuple[Cut, Share]]:
        for coordinate in held.coordinates():
            other = part(held.info, held.division, coordinate)
            cut = _cut(other, stripe, self._holders(held, coordinate), self._rank)
            if cut is not None:
                yield cut, share(other, stripe)

    def _deal(self, candidates: tuple[int, ...]) -> int:
        number = self._dealt.get(candidates, 0)
        self._dealt[candidates] = number + 1
        return candidates[number % len(candidates)]


def alone(held: Held, rank: int, locate: Locate) -> Iterator[Owned]:
    """The stripes that this rank's part has bytes in, each with this part's cut only."""
    coordinate = held.coordinate(rank)
    if coordinate is None:
        return
    mine = part(held.info, held.division, coordinate)
    for stripe in stripes(mine.shape):
        if (cut := _cut(mine, stripe, (rank,), rank)) is not None:
            yield Owned(locate(*stripe), ((cut, share(mine, stripe)),))


def _cut(mine: Part, stripe: Run, holders: tuple[int, ...], owner: int) -> Cut | None:
    start, stop = mine.before(stripe.start), mine.before(stripe.stop)
    return Cut(holders, _nearest(holders, owner), start, stop - start) if start < stop else None


def _nearest(holders: tuple[int, ...], owner: int) -> int:
    """Neighbours in number are neighbours in the machine room. ``holders`` are ascending."""
    at = bisect.bisect_left(holders, owner)
    return min(holders[max(0, at - 1) : at + 1], key=lambda rank: abs(rank - owner))
