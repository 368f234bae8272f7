"""Ranks that together write stripes of more files than a process may have open."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import rankless
from tests.helpers.open_files import few_open_files
from tests.helpers.pool import Ranks

FILES, FREE = 130, 100


def save_columns(path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    tensors = {f"t{n:03d}": distribute_tensor(torch.full((2, 64), float(n)), mesh, [Shard(1)]) for n in range(FILES)}
    with few_open_files(FREE):
        rankless.save_checkpoint(path, "a", tensors, max_shard_size=512)


def test_ranks_save_stripes_of_more_files_than_may_be_open(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, save_columns, tmp_path)
    assert len(list(tmp_path.rglob("*.safetensors"))) >= FILES
    saved = rankless.open(tmp_path)
    for number in range(FILES):
        assert torch.equal(saved[f"model/t{number:03d}"], torch.full((2, 64), float(number)))
