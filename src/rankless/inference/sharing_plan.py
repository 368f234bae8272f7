"""The bytes of stored tensors that one rank needs, and that several need. Pure: all ranks compute the same.

A rank reads the bytes itself that only it needs. Bytes that several ranks need are a *shared region*, for example rows
that have some columns for each rank, or tensors that all ranks hold.

:mod:`rankless.inference.joined_reads` calls it on each rank, with the views of all: no sets without an order, no clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from rankless.engine.plan.element_ranges import ElementRange
from rankless.inference.strided_view import StridedView, join_spans
from rankless.ondisk.block_crcs import BLOCK_BYTES
from rankless.process.prepared_types import prepared

#: The views that a rank needs, by the number of the stored tensor.
ViewsByTensor = dict[int, list[StridedView]]


class SharedRegion(NamedTuple):
    """A range of a stored tensor that ``ranks`` need parts of, or all."""

    range: ElementRange
    ranks: tuple[int, ...]


class SharedStripe(NamedTuple):
    """A range of a stored tensor, inside a block, that rank ``owner`` reads and ``ranks`` need parts of."""

    tensor: int
    start: int
    stop: int
    owner: int
    ranks: tuple[int, ...]


@prepared
class RankViews(msgspec.Struct, frozen=True, array_like=True):
    """The views that a rank needs, as it sends them to the others."""

    views: ViewsByTensor


def split_by_use(views: Mapping[int, Sequence[StridedView]], gap: int) -> list[SharedRegion]:
    """Return the regions of one tensor that the ranks need, in order, by the views of each rank."""
    spans = sorted(
        (span, rank)
        for rank, of_rank in views.items()
        for span in join_spans([span for view in of_rank for span in view.spans(gap)], gap)
    )
    regions: list[SharedRegion] = []
    for span, rank in spans:
        if regions and span.start < regions[-1].range.stop:
            last = regions[-1]
            joined = ElementRange(last.range.start, max(last.range.stop, span.stop))
            regions[-1] = SharedRegion(joined, tuple(sorted({*last.ranks, rank})))
        else:
            regions.append(SharedRegion(span, (rank,)))
    return regions


def iterate_stripes(tensor: int, region: SharedRegion, turn: int) -> Iterator[SharedStripe]:
    """Yield the stripes of a shared region, which its ranks own in turn, from the one of ``turn`` on.

    A stripe is a whole block, if possible, so that its owner verifies it alone. For example, two ranks own the blocks
    of a region alternately.
    """
    start, ranks = region.range.start, region.ranks
    while start < region.range.stop:
        stop = min(region.range.stop, (start // BLOCK_BYTES + 1) * BLOCK_BYTES)
        yield SharedStripe(tensor, start, stop, ranks[turn % len(ranks)], ranks)
        start, turn = stop, turn + 1
