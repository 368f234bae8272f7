"""Placements of tensors over meshes, drawn at random, and torch's own division by them."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st
from torch.distributed import tensor as dtensor
from torch.distributed.tensor.placement_types import _StridedShard

from rankless.engine.plan.layout_types import FlatSharded, MeshShape, Placement, PlacementLayout, Replicated, Sharded
from rankless.ondisk.data_files import TensorInfo
from tests.helpers.torch_limits import SHARDS_UNEVENLY

shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)


dtypes = st.sampled_from(["U8", "BF16", "F32", "C64"])


_LARGEST_SPLIT = 4 if SHARDS_UNEVENLY else 1


@st.composite
def placements(draw: st.DrawFn, shape: tuple[int, ...], mesh: tuple[int, ...]) -> tuple[Placement, ...]:
    """One for each mesh dimension, which replicates or shards any dimension in any way; or the shards of FSDP1."""
    if draw(st.integers(0, 5)) == 0:
        flat = draw(st.integers(0, len(mesh) - 1))
        offset, after = draw(st.integers(0, 12)), draw(st.integers(0, 12))
        length = max(1, -(-(offset + math.prod(shape) + after) // mesh[flat]))
        return tuple(FlatSharded(offset, length) if dim == flat else Replicated() for dim in range(len(mesh)))
    if not shape:
        return (Replicated(),) * len(mesh)
    sharded = st.builds(Sharded, st.integers(0, len(shape) - 1), st.integers(1, _LARGEST_SPLIT))
    columns = st.just(Sharded(len(shape) - 1))
    return tuple(draw(st.one_of(st.just(Replicated()), sharded, columns)) for _ in mesh)


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> PlacementLayout:
    """Up to three mesh dimensions over ranks in any order."""
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    ranks = draw(st.permutations(range(3, 3 + math.prod(mesh))))
    return PlacementLayout(MeshShape(mesh, tuple(ranks)), draw(placements(shape, mesh)))


@st.composite
def tensor_layouts(draw: st.DrawFn) -> tuple[TensorInfo, PlacementLayout]:
    shape = draw(shapes)
    return TensorInfo(draw(dtypes), shape), draw(layouts(shape))


def torch_placement(placement: Placement) -> dtensor.Placement:
    if isinstance(placement, Replicated):
        return dtensor.Replicate()
    if placement.split == 1:
        return dtensor.Shard(placement.dim)
    return _StridedShard(placement.dim, split_factor=placement.split)


def mesh_coordinate(mesh: MeshShape, rank: int) -> list[int]:
    grid = torch.tensor(mesh.ranks).view(mesh.shape)
    return (grid == rank).nonzero()[0].tolist()


def flat_shard(tensor: torch.Tensor, flat: FlatSharded, size: int, at: int) -> torch.Tensor:
    """What FSDP1 gives a rank: parameters one after another, split into equal lengths; here all others are ``-1``."""
    after = size * flat.length - flat.offset - tensor.numel()
    everything = torch.cat([-torch.ones(flat.offset), torch.arange(tensor.numel()), -torch.ones(after)]).long()
    mine = everything.split(flat.length)[at]
    return tensor.flatten()[mine[mine >= 0]]


def torch_shard(tensor: torch.Tensor, layout: PlacementLayout, rank: int) -> torch.Tensor:
    """What torch gives the rank of a tensor, one mesh dimension after the other."""
    places = zip(layout.mesh.shape, layout.placements, mesh_coordinate(layout.mesh, rank), strict=True)
    for size, placement, at in places:
        if isinstance(placement, FlatSharded):
            tensor = flat_shard(tensor, placement, size, at)
        elif isinstance(placement, Sharded):
            chunks, _ = torch_placement(placement)._split_tensor(tensor, size, with_padding=False)
            tensor = chunks[at]
    return tensor
