"""Assignment of stripes to ranks, and the bytes that ranks exchange for each stripe. Pure functions.

Every rank works through its stripes in the same order as all others. So sends and receives between two ranks match,
and the oldest stripe in flight never waits for a younger one.

:mod:`rankless.engine.plan.save_plan` and :mod:`rankless.engine.plan.load_plan` call it on every rank, for all tensors
in the order of their numbers.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rankless.engine.plan.element_ranges import ElementRange
from rankless.engine.plan.file_ranges import FileRange
from rankless.engine.plan.global_spec import GlobalTensor
from rankless.engine.plan.layout_types import Coordinate
from rankless.engine.plan.shard_byte_ranges import LocalShard, Locate, local_shard
from rankless.engine.plan.stripes import StripeSlice, count_stripes, is_narrow, split_into_stripes, stripe_slice


def first_shard(tensor: GlobalTensor) -> LocalShard:
    """Return the first shard of a tensor. No other shard has longer ranges."""
    return local_shard(tensor.info, tensor.division, (0,) * len(tensor.division))


def is_striped(tensor: GlobalTensor) -> bool:
    """Return whether a tensor is moved in stripes: whether the ranges of its shards are narrow."""
    return bool(tensor.division) and is_narrow(first_shard(tensor))


class ShardContribution(NamedTuple):
    """The part of a shard that is in a stripe: ``size`` bytes from offset ``local`` of the shard.

    ``holders`` have these bytes, and ``sender`` is the one that is nearest to the stripe's owner.
    """

    holders: tuple[int, ...]
    sender: int
    local: int
    size: int


class OwnedStripe(NamedTuple):
    """A stripe that this rank assembles or distributes: its ranges of files, and the contributions of all shards."""

    file_ranges: Sequence[FileRange]
    contributions: tuple[tuple[ShardContribution, StripeSlice], ...]


class RemoteStripe(NamedTuple):
    """A stripe that rank ``owner`` handles: its ranges of files, and the contribution of this rank's shard."""

    file_ranges: Sequence[FileRange]
    owner: int
    contribution: ShardContribution

    @property
    def tensor(self) -> int:
        """The number of the stored tensor of the stripe's first byte."""
        return self.file_ranges[0].tensor

    @property
    def start(self) -> int:
        """The position of the stripe's first byte in that tensor. The owner identifies the stripe by both."""
        return self.file_ranges[0].start


StripeTask = OwnedStripe | RemoteStripe


class StripeOwners(NamedTuple):
    """The owners of the stripes of one tensor: ``ranks`` in turn, after ``taken`` turns for the tensors before it.

    For example, of ranks 0, 1 and 2 after 4 turns, rank 1 owns the first stripe, and rank 2 the second one.
    """

    ranks: tuple[int, ...]
    taken: int

    def owner_of(self, stripe: int) -> int:
        """Return the rank that owns a stripe, by its number in the tensor."""
        return self.ranks[(self.taken + stripe) % len(self.ranks)]


class StripeTurns:
    """Counts the turns of ranks that hold the same tensors and own their stripes in turn.

    Each rank counts for itself. All ranks that hold a tensor agree if they count the same tensors in the same order.
    """

    def __init__(self) -> None:
        self._taken: dict[tuple[int, ...], int] = {}

    def assign_owners(self, tensor: GlobalTensor) -> StripeOwners:
        """Return the owners of the stripes of the next tensor."""
        owners = StripeOwners(ranks := tensor.all_ranks(), self._taken.get(ranks, 0))
        self._taken[ranks] = owners.taken + count_stripes(first_shard(tensor).shape)
        return owners


class StripeRoutes:
    """The stripes that concern one rank. ``holders`` returns the ranks that take part for a shard."""

    def __init__(
        self, rank: int, holders: Callable[[GlobalTensor, Coordinate], tuple[int, ...]] = GlobalTensor.holder_ranks
    ) -> None:
        self._rank, self._holders = rank, holders
        self._turns = StripeTurns()

    def route_tensor(self, tensor: GlobalTensor, locate: Locate) -> Iterator[StripeTask]:
        """Yield the stripes of a tensor that this rank owns, and those that contain bytes of its shard.

        Call it for tensors in the order of their numbers, which are the same on all ranks.
        """
        coordinate = tensor.coordinate_of(self._rank)
        if coordinate is None:
            return
        shard, peers = local_shard(tensor.info, tensor.division, coordinate), self._holders(tensor, coordinate)
        owners = self._turns.assign_owners(tensor)
        for number, stripe in enumerate(split_into_stripes(shard.shape)):
            owner = owners.owner_of(number)
            if owner == self._rank:
                yield OwnedStripe(locate(*stripe), tuple(self._all_contributions(tensor, stripe)))
            elif (contribution := _make_contribution(shard, stripe, peers, owner)) is not None:
                yield RemoteStripe(locate(*stripe), owner, contribution)

    def _all_contributions(
        self, tensor: GlobalTensor, stripe: ElementRange
    ) -> Iterator[tuple[ShardContribution, StripeSlice]]:
        for coordinate in tensor.iter_coordinates():
            shard = local_shard(tensor.info, tensor.division, coordinate)
            contribution = _make_contribution(shard, stripe, self._holders(tensor, coordinate), self._rank)
            if contribution is not None:
                yield contribution, stripe_slice(shard, stripe)


def local_stripes(tensor: GlobalTensor, rank: int, locate: Locate) -> Iterator[OwnedStripe]:
    """Yield the stripes that contain bytes of this rank's shard, each with the contribution of this shard only."""
    coordinate = tensor.coordinate_of(rank)
    if coordinate is None:
        return
    shard = local_shard(tensor.info, tensor.division, coordinate)
    for stripe in split_into_stripes(shard.shape):
        if (contribution := _make_contribution(shard, stripe, (rank,), rank)) is not None:
            yield OwnedStripe(locate(*stripe), ((contribution, stripe_slice(shard, stripe)),))


def _make_contribution(
    shard: LocalShard, stripe: ElementRange, holders: tuple[int, ...], owner: int
) -> ShardContribution | None:
    start, stop = shard.bytes_before(stripe.start), shard.bytes_before(stripe.stop)
    return ShardContribution(holders, _nearest_rank(holders, owner), start, stop - start) if start < stop else None


def _nearest_rank(holders: tuple[int, ...], owner: int) -> int:
    """Return the holder nearest to the owner: near numbers are near in the network. ``holders`` are ascending."""
    index = bisect.bisect_left(holders, owner)
    return min(holders[max(0, index - 1) : index + 1], key=lambda rank: abs(rank - owner))
