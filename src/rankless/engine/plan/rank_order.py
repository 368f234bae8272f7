"""The order of the ranks by the place of the bytes that they write. A pure function.

The numbers of ranks say little about that. If replicas share the writing of a shard, the ranks that write adjacent
bytes are those with the same share of neighbouring shards, whatever dimension of the mesh comes first.

:mod:`rankless.engine.plan.save_plan` asks it on every rank; :mod:`rankless.engine.integrity.crc_gather` puts ranks into
buckets in this order. All ranks must get the same order: the leader of a bucket reads the reports of the others from
it.

If all tensors are divided alike, rank 0 gets from all buckets, which have about √hosts reports, at most one fragment
for each block, and for each tensor two, and one for each √ranks shards; on several hosts two for each rank in addition
(``tests/unit/engine/test_rank_order.py``). With several divisions, as of experts, others merge less.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rankless.engine.plan.global_spec import GlobalTensor
from rankless.engine.plan.layout_types import BoxSharded, FlatSharded, Placement, PlacementLayout, axes_by_dim
from rankless.engine.plan.stripe_owners import is_striped
from rankless.engine.plan.tensor_specs import PER_RANK

_Numbers = NDArray[np.int64]

#: Stands for the position of each tensor in the flat parameter of FSDP1, which does not change the order of the shards.
_FLAT = FlatSharded(0, 1)


class _Holders(NamedTuple):
    """The holders of tensors. Of tensors with equal ones, the same ranks write the bytes in the same order."""

    layouts: tuple[PlacementLayout, ...]
    whole_ranks: tuple[int, ...]
    reporting_ranks: tuple[int, ...]
    shared: bool


class _Writers(NamedTuple):
    """The ranks that write tensors: the shard, the share of its bytes, and the number of shares of each rank."""

    ranks: _Numbers
    shard: _Numbers
    share: _Numbers
    share_count: _Numbers


def order_ranks(tensors: Iterable[GlobalTensor], size: int) -> tuple[int, ...]:
    """Return all ``size`` ranks, so ordered that ranks that write adjacent bytes are neighbours.

    Tensors may be divided among the ranks in several ways. Each rank gets its place by the tensors that it writes most
    of. Stripes are left out, because they are large ranges. So are tensors of one rank, because they are next to no
    other rank's bytes.
    """
    tensor_counts: dict[_Holders, int] = {}
    for tensor in tensors:
        if tensor.group != PER_RANK and not is_striped(tensor):
            holders = _holders_of(tensor)
            tensor_counts[holders] = tensor_counts.get(holders, 0) + 1
    written = np.zeros(size)
    division, share, shard = np.full(size, len(tensor_counts)), np.zeros(size, np.int64), np.zeros(size, np.int64)
    for number, (holders, tensor_count) in enumerate(tensor_counts.items()):
        writers = _find_writers(holders)
        written_here = tensor_count / writers.share_count
        chosen = written_here > written[writers.ranks]
        ranks = writers.ranks[chosen]
        written[ranks], division[ranks] = written_here[chosen], number
        share[ranks], shard[ranks] = writers.share[chosen], writers.shard[chosen]
    return tuple(np.lexsort((np.arange(size), shard, share, division)).tolist())


def _holders_of(tensor: GlobalTensor) -> _Holders:
    layouts = tensor.layouts
    if any(isinstance(placement, FlatSharded) for layout in layouts for placement in layout.placements):
        layouts = tuple(
            PlacementLayout(layout.mesh, tuple(map(_without_offset, layout.placements))) for layout in layouts
        )
    return _Holders(layouts, tensor.whole_ranks, () if tensor.is_complete else tensor.reporting_ranks, tensor.shared)


def _without_offset(placement: Placement) -> Placement:
    return _FLAT if isinstance(placement, FlatSharded) else placement


def _find_writers(holders: _Holders) -> _Writers:
    """Return the writers of tensors. Ranks that hold the same shard have the shares in ascending order."""
    ranks = [np.array(layout.mesh.ranks, np.int64) for layout in holders.layouts]
    shards = [_number_shards(layout) for layout in holders.layouts]
    ranks.append(np.array(holders.whole_ranks, np.int64))
    shards.append(np.zeros(len(holders.whole_ranks), np.int64))
    unique, first = np.unique(np.concatenate(ranks), return_index=True)
    shard = np.concatenate(shards)[first]
    if holders.reporting_ranks:
        reports = np.isin(unique, holders.reporting_ranks)
        unique, shard = unique[reports], shard[reports]
    order = np.lexsort((unique, shard))
    unique, shard = unique[order], shard[order]
    _, starts, counts = np.unique(shard, return_index=True, return_counts=True)
    writers = _Writers(unique, shard, np.arange(len(unique)) - np.repeat(starts, counts), np.repeat(counts, counts))
    if holders.shared:
        return writers
    is_first = writers.share == 0
    return _Writers(unique[is_first], shard[is_first], writers.share[is_first], np.ones(len(starts), np.int64))


def _number_shards(layout: PlacementLayout) -> _Numbers:
    """Return the number of the shard of each rank of a mesh, in the order of the bytes of the shards."""
    if layout.placements and isinstance(boxed := layout.placements[0], BoxSharded):
        return np.array(boxed.shards, np.int64)
    index = np.unravel_index(np.arange(len(layout.mesh.ranks)), layout.mesh.shape)
    numbers = np.zeros(len(layout.mesh.ranks), np.int64)
    for axis in _order_axes(layout):
        numbers = numbers * layout.mesh.shape[axis] + index[axis]
    return numbers


def _order_axes(layout: PlacementLayout) -> list[int]:
    """Return the mesh dimensions that divide a tensor; those that divide it into the largest parts first."""
    axes_of_dim = axes_by_dim(layout)
    return [axis for dim in sorted(axes_of_dim) for axis in axes_of_dim[dim]]
