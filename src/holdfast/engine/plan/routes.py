"""Which rank handles which stripe, and which bytes go between ranks for it. Pure functions.

Every rank goes through the stripes that concern it in one and the same order, so that sends and receives
between two ranks meet, and the oldest stripe in flight never waits for a younger one.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from holdfast.engine.plan.file_ranges import FileRange
from holdfast.engine.plan.global_spec import GlobalTensor
from holdfast.engine.plan.placements import Coordinate
from holdfast.engine.plan.ranges import ElementRange
from holdfast.engine.plan.shards import LocalShard, local_shard
from holdfast.engine.plan.stripes import StripeSlice, is_narrow, split_into_stripes, stripe_slice

#: Where bytes ``[start, stop)`` of a tensor lie in files; ``local`` of the pieces counts from ``start``.
Locate = Callable[[int, int], Sequence[FileRange]]


def is_striped(held: GlobalTensor) -> bool:
    """Whether a tensor goes through stripes, judged by its first part, which has the longest runs."""
    return bool(held.division) and is_narrow(local_shard(held.info, held.division, (0,) * len(held.division)))


def contiguous_requests(mine: LocalShard, locate: Locate) -> Iterator[FileRange]:
    """The runs of a part, as they lie in files."""
    local = 0
    for start, stop in mine.runs():
        pieces = locate(start, stop)
        yield from (piece._replace(local=piece.local + local) for piece in pieces) if local else pieces
        local += stop - start


class ShardContribution(NamedTuple):
    """What goes through a stripe of one part: ``size`` bytes from ``local`` on in the part.

    ``holders`` have them, and ``source`` is the nearest of these to the stripe's owner.
    """

    holders: tuple[int, ...]
    source: int
    local: int
    size: int


class OwnedStripe(NamedTuple):
    """A stripe that this rank puts together or takes apart: where it lies in files, and in it the cuts of all parts."""

    pieces: Sequence[FileRange]
    cuts: tuple[tuple[ShardContribution, StripeSlice], ...]


class RemoteStripe(NamedTuple):
    """A stripe that rank ``owner`` handles, with the cut of this rank's part."""

    tensor: int
    start: int
    owner: int
    cut: ShardContribution


Crossing = OwnedStripe | RemoteStripe


class StripeRoutes:
    """The stripes that concern one rank. Ranks that hold the same tensors deal their stripes out in turn.

    ``holders`` tells the ranks that play a part for a part of a tensor.
    """

    def __init__(
        self, rank: int, holders: Callable[[GlobalTensor, Coordinate], tuple[int, ...]] = GlobalTensor.holders
    ) -> None:
        self._rank, self._holders = rank, holders
        self._dealt: dict[tuple[int, ...], int] = {}

    def crossings(self, held: GlobalTensor, locate: Locate) -> Iterator[Crossing]:
        """The stripes of a tensor that this rank owns, and those that its part has bytes in.

        To be asked for tensors in the order of their numbers, which all ranks know them by.
        """
        coordinate = held.coordinate(self._rank)
        if coordinate is None:
            return
        mine, peers = local_shard(held.info, held.division, coordinate), self._holders(held, coordinate)
        candidates = held.everyone()
        for stripe in split_into_stripes(mine.shape):
            owner = self._deal(candidates)
            if owner == self._rank:
                yield OwnedStripe(locate(*stripe), tuple(self._all_cuts(held, stripe)))
            elif (cut := _cut(mine, stripe, peers, owner)) is not None:
                # As its owner knows it: by the stored tensor that the first byte is of.
                first = locate(stripe.start, stripe.start + 1)[0]
                yield RemoteStripe(first.tensor, first.start, owner, cut)

    def _all_cuts(self, held: GlobalTensor, stripe: ElementRange) -> Iterator[tuple[ShardContribution, StripeSlice]]:
        for coordinate in held.coordinates():
            other = local_shard(held.info, held.division, coordinate)
            cut = _cut(other, stripe, self._holders(held, coordinate), self._rank)
            if cut is not None:
                yield cut, stripe_slice(other, stripe)

    def _deal(self, candidates: tuple[int, ...]) -> int:
        number = self._dealt.get(candidates, 0)
        self._dealt[candidates] = number + 1
        return candidates[number % len(candidates)]


def local_stripes(held: GlobalTensor, rank: int, locate: Locate) -> Iterator[OwnedStripe]:
    """The stripes that this rank's part has bytes in, each with this part's cut only."""
    coordinate = held.coordinate(rank)
    if coordinate is None:
        return
    mine = local_shard(held.info, held.division, coordinate)
    for stripe in split_into_stripes(mine.shape):
        if (cut := _cut(mine, stripe, (rank,), rank)) is not None:
            yield OwnedStripe(locate(*stripe), ((cut, stripe_slice(mine, stripe)),))


def _cut(mine: LocalShard, stripe: ElementRange, holders: tuple[int, ...], owner: int) -> ShardContribution | None:
    start, stop = mine.before(stripe.start), mine.before(stripe.stop)
    return ShardContribution(holders, _nearest(holders, owner), start, stop - start) if start < stop else None


def _nearest(holders: tuple[int, ...], owner: int) -> int:
    """Neighbours in number are neighbours in the machine room. ``holders`` are ascending."""
    at = bisect.bisect_left(holders, owner)
    return min(holders[max(0, at - 1) : at + 1], key=lambda rank: abs(rank - owner))
