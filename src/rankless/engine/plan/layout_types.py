"""Divisions of tensors among ranks: meshes and placements as in DTensor, and the flat shards of FSDP1.

``state/`` describes the caller's tensors with them, each rank sends them in its spec, and the plans derive the shards.
:class:`Sharded` must divide as torch does: the bytes of a tensor in a file depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import TypeGuard

import msgspec

from rankless.engine.plan.element_ranges import IndexBox

#: The index of a shard among the shards of a tensor: one number for each mesh dimension that divides the tensor.
Coordinate = tuple[int, ...]


class MeshShape(msgspec.Struct, frozen=True, array_like=True, cache_hash=True):
    """A mesh of ranks. ``ranks`` are in row-major order.

    For example, with shape ``(2, 2)`` and ranks ``(0, 1, 2, 3)`` rank 2 is at place ``(1, 0)``.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]


class Replicated(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """A placement that gives every rank along this mesh dimension the same data."""


class Sharded(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """A placement that splits dimension ``dim`` as ``torch.chunk`` does.

    ``split`` is the factor of a ``_StridedShard``; 1 for a plain ``Shard``. For example, 5 rows on 4 ranks are shards
    of 2, 2, 1 and 0 rows.
    """

    dim: int
    split: int = 1


class FlatSharded(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """A placement of a tensor that is part of a flattened parameter.

    The tensor begins at element ``offset`` of the flat parameter, which is split every ``length`` elements. For
    example, with ``offset=10`` and ``length=16`` a tensor of 12 elements has elements 0-5 on the first rank and 6-11 on
    the second one.
    """

    offset: int
    length: int


class BoxSharded(msgspec.Struct, frozen=True, array_like=True, tag="b", cache_hash=True):
    """A placement where each shard consists of boxes of the tensor: ``boxes`` has the boxes of each shard.

    ``shards`` has the number of the shard of each rank along the mesh dimension; a division has none.
    """

    boxes: tuple[tuple[IndexBox, ...], ...]
    shards: tuple[int, ...] = ()


Placement = Replicated | Sharded | FlatSharded | BoxSharded

#: Division of a tensor, without ranks: the number of shards and the placement of each mesh dimension that divides it.
Division = tuple[tuple[int, Sharded | FlatSharded | BoxSharded], ...]


class PlacementLayout(msgspec.Struct, frozen=True, array_like=True, cache_hash=True):
    """A mesh, and the placement of a tensor on each of its dimensions."""

    mesh: MeshShape
    placements: tuple[Placement, ...]

    @property
    def division(self) -> Division:
        """The mesh dimensions that divide the tensor, without dimensions that replicate or that have one rank."""
        if self.placements and isinstance(boxed := self.placements[0], BoxSharded):
            return ((len(boxed.boxes), BoxSharded(boxed.boxes)),)
        axes = zip(self.mesh.shape, self.placements, strict=True)
        return tuple((size, placement) for size, placement in axes if is_dividing(placement, size))


def is_dividing(placement: Placement, size: int) -> TypeGuard[Sharded | FlatSharded | BoxSharded]:
    """Return whether a placement over ``size`` ranks divides a tensor."""
    return isinstance(placement, FlatSharded | BoxSharded) or (isinstance(placement, Sharded) and size > 1)


def axes_by_dim(layout: PlacementLayout) -> dict[int, list[int]]:
    """Return the mesh dimensions that divide each dimension of a tensor; those that divide it first come first.

    For example, on a ``(2, 4)`` mesh of FSDP2 and tensor parallelism, both along dimension 0 of a tensor, the result is
    ``{0: [1, 0]}``: tensor parallelism divides first, so FSDP2 has ``Sharded(0, split=4)``.
    """
    axes_of_dim: dict[int, list[int]] = {}
    for axis in reversed(range(len(layout.placements))):
        placement, size = layout.placements[axis], layout.mesh.shape[axis]
        if not is_dividing(placement, size):
            continue
        dim, split = (placement.dim, placement.split) if isinstance(placement, Sharded) else (0, 1)
        axes, place, parts = axes_of_dim.setdefault(dim, []), 0, 1
        while parts < split and place < len(axes):  # mesh dimensions to its right divide first
            parts *= layout.mesh.shape[axes[place]]
            place += 1
        axes.insert(place, axis)
    return axes_of_dim


@lru_cache(maxsize=4096)
def intern_layout(layout: PlacementLayout) -> PlacementLayout:
    """Return the first layout equal to this one, so that caches find it without comparing thousands of ranks."""
    return layout


@lru_cache(maxsize=4096)
def ranks_by_coordinate(layout: PlacementLayout) -> Mapping[Coordinate, tuple[int, ...]]:
    """Return the ranks, ascending, that hold each shard.

    For example, a ``(2, 2)`` mesh of ranks 0 to 3 that replicates along its first dimension and shards along its second
    one gives ``{(0,): (0, 2), (1,): (1, 3)}``.
    """
    divides = list(map(is_dividing, layout.placements, layout.mesh.shape))
    holders: dict[Coordinate, list[int]] = {}
    for index, rank in enumerate(layout.mesh.ranks):
        mesh_index = unravel_index(index, layout.mesh.shape)
        coordinate = tuple(at for at, dividing in zip(mesh_index, divides, strict=True) if dividing)
        if isinstance(boxed := layout.placements[0] if layout.placements else None, BoxSharded):
            coordinate = (boxed.shards[index],)
        holders.setdefault(coordinate, []).append(rank)
    return {coordinate: tuple(sorted(ranks)) for coordinate, ranks in holders.items()}


@lru_cache(maxsize=4096)
def coordinate_of_rank(layout: PlacementLayout, rank: int) -> Coordinate | None:
    """Return the coordinate of the shard that ``rank`` holds; ``None`` if it is not in the mesh."""
    return next((coordinate for coordinate, ranks in ranks_by_coordinate(layout).items() if rank in ranks), None)


@lru_cache(maxsize=4096)
def sorted_ranks(mesh: MeshShape) -> tuple[int, ...]:
    """Return the ranks of a mesh, ascending."""
    return tuple(sorted(mesh.ranks))


def unravel_index(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the indices of element ``place`` of an array of ``shape``, in row-major order."""
    return tuple(index // math.prod(shape[axis + 1 :]) % shape[axis] for axis in range(len(shape)))
