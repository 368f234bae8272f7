"""The order of a device mesh's ranks in torch's collectives, which may differ from the mesh's array of ranks.

FSDP2 and DTensor divide by the rank in the process group of each mesh dimension, and torch sorts the ranks of a group.
For example, on ``DeviceMesh("cpu", [2, 0, 3, 1])`` rank 0 holds the first shard.

:mod:`rankless.state.tensor_views` and :mod:`rankless.state.model.fsdp1` ask it on each rank. All ranks of a mesh must
get the same order: it decides which rank holds which bytes.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh

from rankless.engine.plan.layout_types import MeshShape, unravel_index
from rankless.errors import UnsupportedTensorError


def order_mesh(mesh: DeviceMesh, dividing: frozenset[int], subject: str) -> MeshShape:
    """Return a mesh with its ranks in the order of the groups of the dimensions that divide a tensor.

    Raises ``UnsupportedTensorError``, which names ``subject``, if these orders contradict each other: then torch itself
    has no one order of the shards.
    """
    array = np.array(mesh.mesh.tolist(), np.int64).reshape(tuple(mesh.mesh.shape))
    ordered = _order_ranks(array, {dim: _sorts_ranks(mesh, array, dim) for dim in sorted(dividing)})
    if ordered is None:
        raise UnsupportedTensorError(
            f"{subject} is sharded on the device mesh {array.tolist()}: torch sorts the ranks of the process group "
            "of each mesh dimension, and these orders do not form a mesh, so torch itself gathers the shards in a "
            "wrong order; make the mesh with ascending ranks in each dimension"
        )
    return MeshShape(tuple(array.shape), tuple(ordered.reshape(-1).tolist()))


def _sorts_ranks(mesh: DeviceMesh, array: NDArray[np.int64], dim: int) -> bool:
    """Return whether the groups of a dimension have their ranks in ascending order, as torch makes them.

    A rank knows only its own group. Groups made without sorting have the order of the mesh.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return True
    line = array[tuple(slice(None) if axis == dim else at for axis, at in enumerate(coordinate))].tolist()
    try:
        group_ranks = dist.get_process_group_ranks(mesh.get_group(dim))
    except (KeyError, RuntimeError, ValueError):  # the mesh outlived its groups
        return True
    return bool(group_ranks != line or line == sorted(line))


def _order_ranks(array: NDArray[np.int64], sorts: dict[int, bool]) -> NDArray[np.int64] | None:
    """Return the ranks by their places in the groups of some dimensions, which may be sorted.

    Returns ``None`` if two ranks of one line along one of them differ in the place along another, or if not every shard
    has as many holders as every other.
    """
    places = {dim: _places_in_lines(array, dim) for dim, is_sorted in sorts.items() if is_sorted}
    for dim, other in itertools.product(sorts, places):
        if dim != other and (places[other] != places[other].take([0], axis=dim)).any():
            return None
    indices = np.indices(array.shape)
    targets = [places.get(dim, indices[dim]) for dim in range(array.ndim)]
    free = [dim for dim in range(array.ndim) if dim not in sorts]
    by_shard: dict[tuple[int, ...], list[int]] = {}
    keys = np.stack([targets[dim].reshape(-1) for dim in sorts], axis=1) if sorts else np.zeros((array.size, 0), int)
    for rank, key in zip(array.reshape(-1).tolist(), keys.tolist(), strict=True):
        by_shard.setdefault(tuple(key), []).append(rank)
    free_shape = [array.shape[dim] for dim in free]
    if any(len(ranks) != np.prod(free_shape, dtype=int) for ranks in by_shard.values()):
        return None
    ordered = np.empty_like(array)
    for key, ranks in by_shard.items():
        ordered[_index_of(dict(zip(sorts, key, strict=True)), array.ndim)] = np.reshape(ranks, free_shape)
    return ordered


def _index_of(fixed: dict[int, int], ndim: int) -> tuple[int | slice, ...]:
    return tuple(fixed.get(dim, slice(None)) for dim in range(ndim))


def _places_in_lines(array: NDArray[np.int64], dim: int) -> NDArray[np.int64]:
    """Return the place of each rank among the sorted ranks of its line along a dimension.

    For example, the line ``[2, 0, 3, 1]`` gives ``[2, 0, 3, 1]``, and ``[6, 4, 9]`` gives ``[1, 0, 2]``.
    """
    return np.argsort(np.argsort(array, axis=dim), axis=dim)


def place_of(mesh_shape: MeshShape, rank: int) -> tuple[int, ...]:
    """Return the place of a rank of an ordered mesh."""
    return unravel_index(mesh_shape.ranks.index(rank), mesh_shape.shape)
