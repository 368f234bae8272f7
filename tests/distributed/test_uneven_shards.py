"""Tensors whose shards have other sizes than by torch's rule: DTensors, and plain tensors that declare boxes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import rankless
from rankless.errors import UnsupportedTensorError
from tests.helpers.file_contents import read_state_files
from tests.helpers.pairwise import each_value
from tests.helpers.pool import Ranks
from tests.helpers.shard_bytes import checkpointable, cut, dtensor, numbered

#: Sizes of the shards of 8 rows or columns on four ranks; the last ones are those of torch's rule.
SIZES = [[3, 1, 0, 4], [3, 2, 2, 1], [4, 4, 0, 0], [1, 1, 3, 3], [0, 0, 0, 8], [2, 2, 2, 2]]


def _boxed(values: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.w = nn.Parameter(values)
    return module


def _uneven(mesh: DeviceMesh, full: torch.Tensor, dim: int, sizes: list[int]) -> DTensor:
    """A DTensor with shards of these sizes in the order of the ranks of the group."""
    place = dist.get_rank(mesh.get_group(mesh.ndim - 1))
    placements = (*(Replicate() for _ in range(mesh.ndim - 1)), Shard(dim))
    local = full.narrow(dim, sum(sizes[:place]), sizes[place]).clone()
    return dtensor(local, mesh, placements, tuple(full.shape))


def _round_trip(folder: Path, mesh_ranks: list[Any], dim: int, sizes: list[int], width: int) -> list[bool]:
    full = numbered(8, width) if dim == 0 else numbered(width, 8)
    mesh = DeviceMesh("cpu", mesh_ranks)
    model = _boxed(_uneven(mesh, full, dim, sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    model.w.grad = _uneven(mesh, full * 2, dim, sizes)
    optimizer.step()
    rankless.save_checkpoint(folder, "a", model, optimizer)
    plain = _boxed(torch.zeros_like(full))
    plain_optimizer = torch.optim.AdamW(plain.parameters())
    rankless.load_checkpoint(folder, "a", plain, plain_optimizer)
    other = sizes[::-1]
    target = _boxed(_uneven(mesh, torch.zeros_like(full), dim, other))
    target_optimizer = torch.optim.AdamW(target.parameters())
    rankless.load_checkpoint(folder, "a", target, target_optimizer)
    expected = _uneven(mesh, full, dim, other).to_local()
    moment = target_optimizer.state[target.w]["exp_avg"]
    return [
        torch.equal(plain.w, full),
        torch.allclose(plain_optimizer.state[plain.w]["exp_avg"], full * 0.2),
        torch.equal(target.w.to_local(), expected),
        torch.allclose(moment.to_local(), expected * 0.2),
    ]


@each_value({"sizes": SIZES, "dim": [0, 1]})
def test_an_uneven_dtensor_and_its_optimizer_states(ranks: Ranks, tmp_path: Path, dim: int, sizes: list[int]) -> None:
    results = ranks(4, _round_trip, tmp_path, [0, 1, 2, 3], dim, sizes, 3)
    assert results == [[True] * 4] * 4


@pytest.mark.parametrize(("mesh", "sizes"), [([2, 0, 3, 1], [3, 1, 0, 4]), ([[2, 3], [0, 1]], [5, 3])])
def test_uneven_on_a_permuted_mesh_and_with_replicas(
    ranks: Ranks, tmp_path: Path, mesh: list[Any], sizes: list[int]
) -> None:
    assert ranks(4, _round_trip, tmp_path, mesh, 1, sizes, 3) == [[True] * 4] * 4


def _nested(folder: Path) -> bool:
    """Rows divided twice: into 6 and 2 rows, and these into 1 + 5 and 2 + 0."""
    mesh = init_device_mesh("cpu", (2, 2))
    full = numbered(8, 3)
    offset, rows = [(0, 1), (1, 5), (6, 2), (8, 0)][dist.get_rank()]
    tensor = dtensor(cut(full, (offset, 0), (rows, 3)), mesh, (Shard(0), Shard(0)), (8, 3))
    rankless.save_checkpoint(folder, "a", {"w": tensor})
    return torch.equal(rankless.open(folder, "a")["model/w"], full)


def test_one_dimension_divided_twice(ranks: Ranks, tmp_path: Path) -> None:
    assert all(ranks(4, _nested, tmp_path))


def _save_error(folder: Path, make: Any) -> str:
    try:
        rankless.save_checkpoint(folder, "a", {"w": make()})
    except UnsupportedTensorError as error:
        return str(error)
    return "saved"


def _wrong_sum() -> torch.Tensor:
    mesh = init_device_mesh("cpu", (2,))
    return dtensor(torch.ones(3 + dist.get_rank(), 2), mesh, (Shard(0),), (8, 2))


def _part(offset: int, rows: int, total: int = 8) -> torch.Tensor:
    return checkpointable(torch.ones(rows, 2), (total, 2), [(((offset, 0), (rows, 2)), (0, 0))])


def _gap() -> torch.Tensor:
    return _part(5 * dist.get_rank(), 3)


def _overlap() -> torch.Tensor:
    return _part(3 * dist.get_rank(), 5)


def _outside() -> torch.Tensor:
    return checkpointable(torch.ones(3, 2), (8, 2), [(((6, 0), (3, 2)), (0, 0))])


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (_wrong_sum, "[3, 4]"),
        (_gap, "4 of its elements are on no rank"),
        (_overlap, "overlap"),
        (_outside, "not inside"),
    ],
)
def test_parts_that_do_not_make_up_the_tensor_are_refused_by_name(
    ranks: Ranks, tmp_path: Path, make: Any, problem: str
) -> None:
    messages = ranks(2, _save_error, tmp_path, make)
    assert all("'w'" in message and problem in message for message in messages)


def _chunk_list(folder: Path) -> bool:
    mesh = init_device_mesh("cpu", (2,))
    full, rank = numbered(8, 4), dist.get_rank()
    chunks = [((0, 0), (1, 4)), ((6, 0), (2, 4))] if rank == 0 else [((1, 0), (5, 4))]
    local = torch.cat([cut(full, *chunk) for chunk in chunks])
    tensor = dtensor(local, mesh, (Shard(0),), (8, 4))
    tensor._local_tensor.__create_chunk_list__ = partial(  # type: ignore[attr-defined]
        list, [ChunkStorageMetadata(torch.Size(offset), torch.Size(size)) for offset, size in chunks]
    )
    rankless.save_checkpoint(folder, "a", {"w": tensor})
    saved = torch.equal(rankless.open(folder, "a")["model/w"], full)
    expected = local.clone()
    tensor._local_tensor.zero_()
    rankless.load_checkpoint(folder, "a", {"w": tensor})
    return saved and torch.equal(tensor.to_local(), expected)


def test_the_list_of_chunks_of_a_local_tensor(ranks: Ranks, tmp_path: Path) -> None:
    assert all(ranks(2, _chunk_list, tmp_path))


def _as_dtensor(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = _boxed(distribute_tensor(numbered(8, 4), mesh, [Shard(0)]))
    rankless.save_checkpoint(folder, "a", model)


def _as_checkpointable(folder: Path) -> None:
    rank = dist.get_rank()
    model = _boxed(cut(numbered(8, 4), (4 * rank, 0), (4, 4)))
    checkpointable(model.w, (8, 4), [(((4 * rank, 0), (4, 4)), (0, 0))])
    rankless.save_checkpoint(folder, "a", model)


def test_a_checkpointable_tensor_gives_the_files_of_a_dtensor(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _as_dtensor, tmp_path / "dtensor")
    ranks(2, _as_checkpointable, tmp_path / "plain")
    files = [read_state_files(tmp_path / run / "a") for run in ("dtensor", "plain")]
    assert files[0] == files[1]
    assert files[0]


#: The boxes of an 8 x 4 tensor on two ranks, each with its start in a local tensor of 6 x 5 with padding.
PADDED = [
    [(((0, 0), (3, 2)), (0, 0)), (((5, 1), (3, 3)), (3, 2))],
    [(((0, 2), (3, 2)), (4, 0)), (((3, 0), (2, 4)), (0, 1)), (((5, 0), (3, 1)), (2, 2))],
]


def _padded(full: torch.Tensor, parts: list[Any]) -> nn.Module:
    local = torch.full((7, 5), -1.0)
    for (offset, shape), start in parts:
        local[tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))] = cut(full, offset, shape)
    model = _boxed(local)
    checkpointable(model.w, tuple(full.shape), parts)
    return model


def _several_boxes(folder: Path) -> list[bool]:
    rank, full = dist.get_rank(), numbered(8, 4)
    model = _padded(full, PADDED[rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    model.w.grad = _padded(full * 2, PADDED[rank]).w.detach()
    optimizer.step()
    rankless.save_checkpoint(folder, "a", model, optimizer)
    plain = _boxed(torch.zeros_like(full))
    plain_optimizer = torch.optim.AdamW(plain.parameters())
    rankless.load_checkpoint(folder, "a", plain, plain_optimizer)
    target = _padded(torch.zeros_like(full), PADDED[1 - rank])
    target_optimizer = torch.optim.AdamW(target.parameters())
    rankless.load_checkpoint(folder, "a", target, target_optimizer)
    mask = _padded(full, PADDED[1 - rank]).w > 0
    return [
        torch.equal(plain.w, full),
        torch.allclose(plain_optimizer.state[plain.w]["exp_avg"], full * 0.2),
        torch.equal(target.w, _padded(full, PADDED[1 - rank]).w),
        torch.allclose(
            target_optimizer.state[target.w]["exp_avg"][mask], _padded(full * 0.2, PADDED[1 - rank]).w[mask]
        ),
    ]


def test_several_boxes_with_padding_and_their_optimizer_states(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, _several_boxes, tmp_path) == [[True] * 4] * 2


def _equal_parts(folder: Path) -> tuple[int, ...]:
    rank = dist.get_rank()
    model = _boxed(torch.zeros(4, 4))
    checkpointable(model.w, (8, 4), [(((4 * rank, 0), (4, 4)), (0, 0))])
    optimizer = torch.optim.AdamW(model.parameters())
    model.w.grad = torch.ones(4, 4)
    optimizer.step()
    rankless.save_checkpoint(folder, "a", model, optimizer)
    plain = _boxed(torch.zeros(8, 4))
    plain_optimizer = torch.optim.AdamW(plain.parameters())
    rankless.load_checkpoint(folder, "a", plain, plain_optimizer)
    return tuple(plain_optimizer.state[plain.w]["exp_avg"].shape)


def test_equal_parts_are_not_taken_for_one_tensor(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, _equal_parts, tmp_path) == [(8, 4)] * 2
