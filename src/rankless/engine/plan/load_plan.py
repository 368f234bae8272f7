"""The plan of a load: the bytes that each rank reads, and the ranks that it sends them to.

It is a pure function of all ranks' tensors and of the own rank.

:mod:`rankless.load.rank_reads` calls :func:`plan_load` on every rank, in the vote "matching the checkpoint with what it
is loaded into". The order of the exchanged items must be the same on all ranks, or sends and receives do not match.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from rankless.engine.plan.file_ranges import FileRange, IoChunk, count_bytes, tensor_chunks
from rankless.engine.plan.global_spec import GlobalTensor
from rankless.engine.plan.shard_byte_ranges import local_shard, locate_shard
from rankless.engine.plan.stripe_owners import (
    OwnedStripe,
    StripeRoutes,
    StripeTask,
    is_striped,
    local_stripes,
)
from rankless.ondisk.block_crcs import BLOCK_BYTES


class BroadcastChunk(NamedTuple):
    """A chunk that rank ``owner`` reads and sends to all ``holders``. It is at the same place in all their shards."""

    owner: int
    holders: tuple[int, ...]
    chunk: IoChunk


class LoadPlan(msgspec.Struct):
    """The share of the reading of one rank.

    ``file_ranges`` are read straight into its shards. So are those in ``host_shared``, which other ranks read, too.
    Each stripe in ``local_stripes`` is read whole, and the rank keeps its own part of it. Each item of ``exchanged`` is
    read by one rank and sent to the others; their order is the same on all ranks.
    """

    file_ranges: list[FileRange] = msgspec.field(default_factory=list)
    host_shared: list[FileRange] = msgspec.field(default_factory=list)
    local_stripes: list[OwnedStripe] = msgspec.field(default_factory=list)
    exchanged: list[StripeTask | BroadcastChunk] = msgspec.field(default_factory=list)

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


#: Returns the file ranges of bytes ``[start, stop)`` of tensor number n; their ``local`` counts from ``start``.
LocateInTensor = Callable[[int, int, int], Sequence[FileRange]]


class _Turn(NamedTuple):
    """The place of an item in the order that all ranks keep: within its round first, then by its own first byte.

    ``round_start`` is the tensor and the offset of the first byte of the round, ``number`` counts the items that one
    rank owns in it. A stripe is a round of its own.
    """

    round_start: tuple[int, int]
    number: int
    start: tuple[int, int]


def plan_load(tensors: Mapping[int, GlobalTensor], rank: int, locate: LocateInTensor, *, exchange: bool) -> LoadPlan:
    """Return the plan of ``rank`` for tensors by number. With ``exchange`` each byte is read by one rank only.

    Tensors and files must have the same numbers on all ranks.
    """
    plan, routes = LoadPlan(), StripeRoutes(rank)
    copies: dict[tuple[int, ...], list[FileRange]] = {}
    turns: list[tuple[_Turn, StripeTask | BroadcastChunk]] = []
    for number, tensor in sorted(tensors.items()):
        coordinate = tensor.coordinate_of(rank)
        if coordinate is None:
            continue
        if is_striped(tensor):
            if exchange:
                stripes = routes.route_tensor(tensor, partial(locate, number))
                turns += [(_Turn(_first_byte(stripe), 0, _first_byte(stripe)), stripe) for stripe in stripes]
            else:
                plan.local_stripes += local_stripes(tensor, rank, partial(locate, number))
            continue
        file_ranges = copies.setdefault(tensor.holder_ranks(coordinate), [])
        if tensor.division:
            shard = local_shard(tensor.info, tensor.division, coordinate)
            file_ranges.extend(locate_shard(shard, partial(locate, number)))
        elif nbytes := tensor.info.nbytes:
            file_ranges.extend(locate(number, 0, nbytes))
    plan.file_ranges = copies.pop((rank,), [])
    for holders, file_ranges in copies.items():
        if exchange:
            turns += _broadcast_chunks(holders, file_ranges)
        else:
            plan.host_shared += file_ranges
    plan.exchanged = [item for _, item in sorted(turns, key=lambda turn: turn[0])]
    return plan


def _broadcast_chunks(
    holders: tuple[int, ...], file_ranges: Sequence[FileRange]
) -> Iterator[tuple[_Turn, BroadcastChunk]]:
    """Yield chunks that the holders own in turn.

    In a round each holder owns one run of chunks. The order takes one chunk of each run after the other, so that all
    holders send at the same time: the link of one alone would carry all copies of its run.
    """
    ordered = sorted(file_ranges, key=lambda file_range: (file_range.file, file_range.offset))
    runs = list(_split_into_runs(list(tensor_chunks(ordered)), len(holders)))
    for first in range(0, len(runs), len(holders)):
        round_start = _start_of(runs[first][0])
        for owner, run in zip(holders, runs[first : first + len(holders)], strict=False):
            for number, chunk in enumerate(run):
                yield _Turn(round_start, number, _start_of(chunk)), BroadcastChunk(owner, holders, chunk)


def _split_into_runs(chunks: Sequence[IoChunk], count: int) -> Iterator[Sequence[IoChunk]]:
    """Yield runs of at most a block of a tensor, and of fewer bytes if there would not be ``count`` runs.

    One rank reads a block, if possible, so that it can verify the block alone.
    """
    most_bytes = min(BLOCK_BYTES, sum(chunk.size for chunk in chunks) // count)
    run: list[IoChunk] = []
    nbytes = 0
    for chunk in chunks:
        _, start = _start_of(chunk)
        begins_block = start % BLOCK_BYTES == 0 and (start or nbytes > most_bytes // 2)
        if run and (begins_block or nbytes + chunk.size > most_bytes):
            yield run
            run, nbytes = [], 0
        run.append(chunk)
        nbytes += chunk.size
    if run:
        yield run


def _start_of(chunk: IoChunk) -> tuple[int, int]:
    return chunk.file_ranges[0].tensor, chunk.file_ranges[0].start


def _count_item_bytes(item: StripeTask | BroadcastChunk) -> int:
    if isinstance(item, BroadcastChunk):
        return item.chunk.size
    return count_bytes(item.file_ranges) if isinstance(item, OwnedStripe) else item.contribution.size


def _first_byte(item: StripeTask) -> tuple[int, int]:
    """Return the tensor and the offset of the first byte, which is in no other item."""
    if isinstance(item, OwnedStripe):
        return item.file_ranges[0].tensor, item.file_ranges[0].start
    return item.tensor, item.start
