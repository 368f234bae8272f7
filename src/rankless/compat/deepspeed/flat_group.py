"""The flat tensor of a group of parameters, which is divided among ranks, and the parameters in it. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rankless.state.model.flat_shards import FlatShard


@dataclass(frozen=True)
class RankPlace:
    """The place of this rank among the ranks that share a flat tensor; all have all of it if ``is_replicated``."""

    rank: int
    ranks: tuple[int, ...]
    is_replicated: bool = False


@dataclass(frozen=True)
class FlatGroup:
    """A flat tensor of which each rank has a part.

    Attributes:
        flat: The part of this rank, which is what its optimizer holds.
        length: The number of elements of each rank's part of what is divided: a group of parameters, or one parameter.
        place: The place of this rank.
        start: The offset in ``flat`` of what is divided.
    """

    flat: torch.Tensor
    length: int
    place: RankPlace
    start: int = 0

    def make_shard(self, names: Sequence[str], shape: tuple[int, ...], offset: int) -> FlatShard:
        """Return the shard of a parameter that begins at element ``offset`` of what is divided."""
        first = self.place.rank * self.length
        low, high = (min(max(edge - first, 0), self.length) for edge in (offset, offset + math.prod(shape)))
        low, high = self.start + low, self.start + high
        name, *tied = names
        ranks = self.place.ranks
        mesh_shape = (len(ranks), 1) if self.place.is_replicated else (len(ranks),)
        local = self.flat.detach()[low:high]
        return FlatShard(
            name,
            tuple(tied),
            self.flat,
            shape,
            local.dtype,
            local,
            low,
            offset,
            self.length,
            mesh_shape,
            ranks,
        )
