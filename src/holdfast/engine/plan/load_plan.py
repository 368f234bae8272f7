"""Who reads which bytes, and who passes them on: a pure function of what all ranks want and the number of this one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast.engine.plan.file_ranges import FileRange, IoChunk, count_bytes, tensor_chunks
from holdfast.engine.plan.global_spec import GlobalTensor
from holdfast.engine.plan.partition import partition_tensor, split_evenly
from holdfast.engine.plan.routes import (
    Crossing,
    Locate,
    OwnedStripe,
    StripeRoutes,
    contiguous_requests,
    is_striped,
    local_stripes,
)
from holdfast.engine.plan.shards import local_shard


class BroadcastChunk(NamedTuple):
    """A chunk that rank ``owner`` reads and passes on to all ``holders``, whose parts have it at the same place."""

    owner: int
    holders: tuple[int, ...]
    chunk: IoChunk


@dataclass
class LoadPlan:
    """One rank's share of the reading.

    ``pieces`` go straight into its parts, as do those in ``common``, which other ranks read, too; of the stripes in
    ``alone`` it takes what is its own; ``shared`` is read by one rank and passed on, in an order that is the same on
    all ranks.
    """

    pieces: list[FileRange] = field(default_factory=list)
    common: list[FileRange] = field(default_factory=list)
    alone: list[OwnedStripe] = field(default_factory=list)
    shared: list[Crossing | BroadcastChunk] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """The bytes that this rank reads or takes in."""
        stripes = sum(count_bytes(stripe.pieces) for stripe in self.alone)
        return (
            count_bytes(self.pieces) + count_bytes(self.common) + stripes + sum(_nbytes(item) for item in self.shared)
        )


#: Where the bytes of tensor number n lie.
LocateTensor = Callable[[int], Locate]


def plan_load(held: Mapping[int, GlobalTensor], rank: int, locate: LocateTensor, *, exchange: bool) -> LoadPlan:
    """The plan of ``rank`` for the tensors wanted, by number. With ``exchange`` each byte is read by one rank only.

    Tensors and files must have the same numbers on all ranks.
    """
    plan, routes = LoadPlan(), StripeRoutes(rank)
    copies: dict[tuple[int, ...], list[FileRange]] = {}
    for tensor, wanted in sorted(held.items()):
        coordinate = wanted.coordinate(rank)
        if coordinate is None:
            continue
        if is_striped(wanted):
            if exchange:
                plan.shared += routes.crossings(wanted, locate(tensor))
            else:
                plan.alone += local_stripes(wanted, rank, locate(tensor))
            continue
        holders = wanted.holders(coordinate)
        mine = local_shard(wanted.info, wanted.division, coordinate)
        copies.setdefault(holders, []).extend(contiguous_requests(mine, locate(tensor)))
    plan.pieces = copies.pop((rank,), [])
    for holders, pieces in copies.items():
        if exchange:
            plan.shared += _copied(holders, pieces)
        else:
            plan.common += pieces
    plan.shared.sort(key=_order)
    return plan


def _copied(holders: tuple[int, ...], pieces: Sequence[FileRange]) -> Iterator[BroadcastChunk]:
    ordered = sorted(pieces, key=lambda piece: (piece.file, piece.offset))
    for place, owner in enumerate(holders):
        share = [
            piece for piece in split_evenly(ordered, place, len(holders), partition_tensor) if piece.start < piece.stop
        ]
        yield from (BroadcastChunk(owner, holders, chunk) for chunk in tensor_chunks(share))


def _nbytes(item: Crossing | BroadcastChunk) -> int:
    if isinstance(item, BroadcastChunk):
        return item.chunk.size
    return count_bytes(item.pieces) if isinstance(item, OwnedStripe) else item.cut.size


def _order(item: Crossing | BroadcastChunk) -> tuple[int, int]:
    """By the first byte, which is in no other item."""
    if isinstance(item, BroadcastChunk):
        return item.chunk.pieces[0].tensor, item.chunk.pieces[0].start
    if isinstance(item, OwnedStripe):
        return item.pieces[0].tensor, item.pieces[0].start
    return item.tensor, item.start
