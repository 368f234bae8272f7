"""The plan of a load: which ranks read which bytes, and send them to which ranks.

It is a pure function of the tensors that all ranks load and of the own rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast.engine.plan.file_ranges import FileRange, IoChunk, count_bytes, tensor_chunks
from holdfast.engine.plan.global_spec import GlobalTensor
from holdfast.engine.plan.partition import partition_tensor, split_evenly
from holdfast.engine.plan.routes import (
    Locate,
    OwnedStripe,
    StripeRoutes,
    StripeTask,
    contiguous_requests,
    is_striped,
    local_stripes,
)
from holdfast.engine.plan.shards import local_shard


class BroadcastChunk(NamedTuple):
    """A chunk that rank ``owner`` reads and sends to all ``holders``. It is at the same place in all their shards."""

    owner: int
    holders: tuple[int, ...]
    chunk: IoChunk


@dataclass
class LoadPlan:
    """The share of the reading of one rank.

    ``file_ranges`` are read straight into its shards. So are those in ``host_shared``, which other ranks read, too.
    Each stripe in ``local_stripes`` is read whole, and the rank keeps its own part of it. Each item of ``exchanged`` is
    read by one rank and sent to the others; their order is the same on all ranks.
    """

    file_ranges: list[FileRange] = field(default_factory=list)
    host_shared: list[FileRange] = field(default_factory=list)
    local_stripes: list[OwnedStripe] = field(default_factory=list)
    exchanged: list[StripeTask | BroadcastChunk] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """The bytes that this rank reads or receives."""
        stripes = sum(count_bytes(stripe.file_ranges) for stripe in self.local_stripes)
        return (
            count_bytes(self.file_ranges)
            + count_bytes(self.host_shared)
            + stripes
            + sum(_count_item_bytes(item) for item in self.exchanged)
        )


#: Returns the function that locates bytes of tensor number n in files.
LocateTensor = Callable[[int], Locate]


def plan_load(tensors: Mapping[int, GlobalTensor], rank: int, locate: LocateTensor, *, exchange: bool) -> LoadPlan:
    """Return the plan of ``rank`` for tensors by number. With ``exchange`` each byte is read by one rank only.

    Tensors and files must have the same numbers on all ranks.
    """
    plan, routes = LoadPlan(), StripeRoutes(rank)
    copies: dict[tuple[int, ...], list[FileRange]] = {}
    for number, tensor in sorted(tensors.items()):
        coordinate = tensor.coordinate_of(rank)
        if coordinate is None:
            continue
        if is_striped(tensor):
            if exchange:
                plan.exchanged += routes.route_tensor(tensor, locate(number))
            else:
                plan.local_stripes += local_stripes(tensor, rank, locate(number))
            continue
        holders = tensor.holder_ranks(coordinate)
        shard = local_shard(tensor.info, tensor.division, coordinate)
        copies.setdefault(holders, []).extend(contiguous_requests(shard, locate(number)))
    plan.file_ranges = copies.pop((rank,), [])
    for holders, file_ranges in copies.items():
        if exchange:
            plan.exchanged += _broadcast_chunks(holders, file_ranges)
        else:
            plan.host_shared += file_ranges
    plan.exchanged.sort(key=_first_byte)
    return plan


def _broadcast_chunks(holders: tuple[int, ...], file_ranges: Sequence[FileRange]) -> Iterator[BroadcastChunk]:
    ordered = sorted(file_ranges, key=lambda file_range: (file_range.file, file_range.offset))
    for index, owner in enumerate(holders):
        share = [
            file_range
            for file_range in split_evenly(ordered, index, len(holders), partition_tensor)
            if file_range.start < file_range.stop
        ]
        yield from (BroadcastChunk(owner, holders, chunk) for chunk in tensor_chunks(share))


def _count_item_bytes(item: StripeTask | BroadcastChunk) -> int:
    if isinstance(item, BroadcastChunk):
        return item.chunk.size
    return count_bytes(item.file_ranges) if isinstance(item, OwnedStripe) else item.contribution.size


def _first_byte(item: StripeTask | BroadcastChunk) -> tuple[int, int]:
    """Return the tensor and the offset of the first byte, which is in no other item."""
    if isinstance(item, BroadcastChunk):
        return item.chunk.file_ranges[0].tensor, item.chunk.file_ranges[0].start
    if isinstance(item, OwnedStripe):
        return item.file_ranges[0].tensor, item.file_ranges[0].start
    return item.tensor, item.start
