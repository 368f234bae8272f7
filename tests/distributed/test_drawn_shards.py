"""Drawn meshes, placements and sizes: what is saved is what the ranks hold, by the order of the groups."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import rankless
from rankless.errors import UnsupportedTensorError
from tests.helpers.examples import examples
from tests.helpers.pool import Ranks
from tests.helpers.shard_bytes import cut, dtensor, numbered

#: The places of four ranks in their groups: by the ranks themselves, without torch. torch sorts the ranks of a group.
Case = tuple[list[Any], tuple[int | None, ...], list[list[int]], int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A mesh of four ranks; for each dimension the dimension that it divides, and the sizes; the order of a load."""
    order = draw(st.permutations(range(4)))
    mesh = draw(st.sampled_from([order, [order[:2], order[2:]]]))
    shape = (4,) if mesh is order else (2, 2)
    dims: tuple[int | None, ...] = tuple(draw(st.sampled_from([None, 0, 1])) for _ in shape)
    if len(dims) == 2 and dims[0] == dims[1]:
        dims = (dims[0], None)
    sizes = [draw(st.lists(st.integers(0, 4), min_size=count, max_size=count).filter(sum)) for count in shape]
    return mesh, dims, sizes, draw(st.integers(0, 1))


def _shards(case: Case, *, reverse: bool) -> tuple[torch.Tensor, DTensor]:
    mesh, dims, sizes, _ = case
    device_mesh = DeviceMesh("cpu", mesh)
    shape, offset, size = [3, 3], [0, 0], [3, 3]
    for axis, dim in enumerate(dims):
        if dim is None:
            continue
        along = sizes[axis][::-1] if reverse else sizes[axis]
        place = dist.get_rank(device_mesh.get_group(axis))
        shape[dim], offset[dim], size[dim] = sum(along), sum(along[:place]), along[place]
    placements: tuple[Placement, ...] = tuple(Replicate() if dim is None else Shard(dim) for dim in dims)
    full = numbered(*shape)
    return full, dtensor(cut(full, tuple(offset), tuple(size)), device_mesh, placements, tuple(shape))


def _round_trip(folder: Path, case: Case) -> str:
    full, tensor = _shards(case, reverse=False)
    _, target = _shards(case, reverse=bool(case[3]))
    expected = target.to_local().clone()
    target.to_local().zero_()
    try:
        rankless.save_checkpoint(folder, "a", {"w": tensor})
        is_saved = torch.equal(rankless.open(folder, "a")["model/w"], full)
        rankless.load_checkpoint(folder, "a", {"w": target})
    except UnsupportedTensorError as error:
        return f"refused: {error}"
    return f"saved {is_saved}, loaded {torch.equal(target.to_local(), expected)}"


def _is_contradiction(case: Case) -> bool:
    """Whether ranks of one line of a dimension that divides have different places in the lines of the other one."""
    mesh, dims, _, _ = case
    if None in dims or len(dims) == 1:
        return False
    rows, columns = [sorted(row) for row in mesh], [sorted(column) for column in zip(*mesh, strict=True)]
    place = {
        rank: (columns[c].index(rank), rows[r].index(rank)) for r, row in enumerate(mesh) for c, rank in enumerate(row)
    }
    lines = [*((row, 0) for row in mesh), *((list(column), 1) for column in zip(*mesh, strict=True))]
    return any(len({place[rank][fixed] for rank in line}) > 1 for line, fixed in lines)


@settings(
    max_examples=examples(180, 6),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(case=cases())
@example(case=([[0, 1], [2, 3]], (0, 1), [[0, 1], [0, 1]], 0))  # a shard without elements, not where torch has it
def test_a_checkpoint_has_what_the_ranks_hold(ranks: Ranks, case: Case) -> None:
    with TemporaryDirectory() as folder:
        results = ranks(4, _round_trip, Path(folder), case)
    if all(result == "saved True, loaded True" for result in results):
        assert not _is_contradiction(case)
        return
    # Also refused are sizes that torch gives to the place in the mesh: it makes such shards from other rows.
    assert all(result.startswith("refused:") and "'w'" in result and "ascending" in result for result in results)
    assert not _is_ascending(case[0])


def _is_ascending(mesh: list[Any]) -> bool:
    array = torch.tensor(mesh)
    return all(torch.equal(array.sort(dim).values, array) for dim in range(array.ndim))
