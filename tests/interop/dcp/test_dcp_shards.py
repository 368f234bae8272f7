"""Shards that torch's DCP places wrongly are refused by the storage of rankless, by name on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from rankless.dcp import FileSystemReader, FileSystemWriter
from rankless.errors import UnsupportedTensorError
from tests.helpers.pool import Ranks
from tests.helpers.shard_bytes import checkpointable, cut, dtensor, numbered

KNOWS_CHECKPOINTABLE_TENSORS = hasattr(dcp, "CheckpointableTensor")


def _even() -> DTensor:
    return distribute_tensor(numbered(8, 4), init_device_mesh("cpu", (2,)), [Shard(0)])


def _permuted() -> DTensor:
    place = 1 - DeviceMesh("cpu", [1, 0]).get_local_rank()
    return dtensor(cut(numbered(8, 4), (4 * place, 0), (4, 4)), DeviceMesh("cpu", [1, 0]), (Shard(0),), (8, 4))


def _uneven() -> DTensor:
    rank = dist.get_rank()
    local = cut(numbered(8, 4), (5 * rank, 0), (5 - 2 * rank, 4))
    return dtensor(local, init_device_mesh("cpu", (2,)), (Shard(0),), (8, 4))


def _checkpointable() -> torch.Tensor:
    rank = dist.get_rank()
    return checkpointable(cut(numbered(8, 4), (4 * rank, 0), (4, 4)), (8, 4), [(((4 * rank, 0), (4, 4)), (0, 0))])


REFUSED = [_permuted, _uneven] + ([] if KNOWS_CHECKPOINTABLE_TENSORS else [_checkpointable])


def _save(folder: Path, make: Callable[[], torch.Tensor], *, is_async: bool = False) -> str:
    state = {"w": make()}
    writer = FileSystemWriter(folder)
    try:
        if is_async:
            dcp.async_save(state, storage_writer=writer).result()
        else:
            dcp.save(state, storage_writer=writer)
    except (CheckpointException, UnsupportedTensorError) as error:
        return str(error)
    return "saved"


def _load(folder: Path, make: Callable[[], torch.Tensor]) -> str:
    try:
        dcp.load({"w": make()}, storage_reader=FileSystemReader(folder))
    except (CheckpointException, UnsupportedTensorError) as error:
        return str(error)
    return "loaded"


@pytest.mark.parametrize("make", REFUSED)
def test_a_save_is_refused_by_name(ranks: Ranks, tmp_path: Path, make: Callable[[], torch.Tensor]) -> None:
    messages = ranks(2, _save, tmp_path / "a", make)
    assert all("'w'" in message and "save_checkpoint" in message for message in messages)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("make", [_permuted, _uneven])
def test_a_load_is_refused_by_name(ranks: Ranks, tmp_path: Path, make: Callable[[], torch.Tensor]) -> None:
    assert ranks(2, _save, tmp_path / "a", _even) == ["saved"] * 2
    messages = ranks(2, _load, tmp_path / "a", make)
    assert all("'w'" in message and "load_checkpoint" in message for message in messages)


@pytest.mark.skipif(not KNOWS_CHECKPOINTABLE_TENSORS, reason="torch's planner knows the protocol from torch 2.14 on")
def test_a_checkpointable_tensor_gives_the_files_of_a_dtensor(ranks: Ranks, tmp_path: Path) -> None:
    for name, make in (("plain", _checkpointable), ("dtensor", _even)):
        assert ranks(2, _save, tmp_path / name, make) == ["saved"] * 2
    plain, dtensors = (
        {file.name: file.read_bytes() for file in (tmp_path / name).glob("*.distcp")} for name in ("plain", "dtensor")
    )
    assert plain == dtensors
    assert ranks(2, _load, tmp_path / "plain", _checkpointable) == ["loaded"] * 2
