"""How tensors are divided among ranks: meshes and placements, as in DTensor, and the flat shards of FSDP1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import TypeGuard

import msgspec

#: The place of a part among the parts of a tensor: one number for each mesh dimension that divides it.
Coordinate = tuple[int, ...]


class MeshShape(msgspec.Struct, frozen=True, array_like=True, cache_hash=True):
    """Ranks in rows and columns: ``ranks`` is the mesh, flattened row-major."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]


class Replicated(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """Every rank along this mesh dimension holds the same."""


class Sharded(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """Dimension ``dim`` is cut as ``torch.chunk`` cuts. ``split`` is the factor of a ``_StridedShard``; 1 is none."""

    dim: int
    split: int = 1


class FlatSharded(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """The tensor lies, flattened, at element ``offset`` of something longer that is cut every ``length`` elements."""

    offset: int
    length: int


Placement = Replicated | Sharded | FlatSharded

#: How a tensor is divided, whoever holds the parts: number of parts and placement of each mesh dimension that divides.
Division = tuple[tuple[int, Sharded | FlatSharded], ...]


class PlacementLayout(msgspec.Struct, frozen=True, array_like=True, cache_hash=True):
    """Where the parts of a tensor are."""

    mesh: MeshShape
    placements: tuple[Placement, ...]

    @property
    def division(self) -> Division:
        """What divides the tensor; replicating dimensions, and those of one rank, do not."""
        axes = zip(self.mesh.shape, self.placements, strict=True)
        return tuple((size, placement) for size, placement in axes if _divides(placement, size))


def _divides(placement: Placement, size: int) -> TypeGuard[Sharded | FlatSharded]:
    return isinstance(placement, FlatSharded) or (isinstance(placement, Sharded) and size > 1)


@lru_cache(maxsize=4096)
def is_supported(layout: PlacementLayout) -> PlacementLayout:
    """The first of the layouts that are equal to this one: caches find it without comparing thousands of ranks."""
    return layout


@lru_cache(maxsize=4096)
def holding_coordinates(layout: PlacementLayout) -> Mapping[Coordinate, tuple[int, ...]]:
    """The ranks, ascending, that hold each part."""
    divides = list(map(_divides, layout.placements, layout.mesh.shape))
    found: dict[Coordinate, list[int]] = {}
    for place, rank in enumerate(layout.mesh.ranks):
        whole = unravel_index(place, layout.mesh.shape)
        part = tuple(at for at, dividing in zip(whole, divides, strict=True) if dividing)
        found.setdefault(part, []).append(rank)
    return {part: tuple(sorted(ranks)) for part, ranks in found.items()}


@lru_cache(maxsize=4096)
def shard_index(layout: PlacementLayout, rank: int) -> Coordinate | None:
    """The part that ``rank`` holds; ``None`` where it is not in the mesh."""
    return next((part for part, ranks in holding_coordinates(layout).items() if rank in ranks), None)


@lru_cache(maxsize=4096)
def all_coordinates(mesh: MeshShape) -> tuple[int, ...]:
    """The ranks of a mesh, ascending."""
    return tuple(sorted(mesh.ranks))


def unravel_index(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The indices of element ``place`` of an array of ``shape``, in row-major order."""
    return tuple(place // math.prod(shape[axis + 1 :]) % shape[axis] for axis in range(len(shape)))
