"""Tests the memory that a ``Checkpointer`` prepares before the first save in the background."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import rankless
from rankless import run_directory
from rankless.engine.io.staging_memory import StagingMemory
from rankless.save.background import background_saves
from rankless.storage import cgroup_memory
from tests.helpers.pool import Ranks

#: The factor by which an estimate may miss what a rank stages.
_TOLERANCE = 1.125


def large_run(layout: str) -> tuple[Any, torch.optim.Optimizer]:
    """A model of 3 MB with the states of AdamW."""
    model: Any = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    world_size = dist.get_world_size()
    if layout == "ddp":
        model = DistributedDataParallel(model)
    elif layout == "fsdp1":
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    elif layout == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    elif layout == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("copies", "shards")))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    return model, optimizer


def first_save(folder: str, layout: str) -> tuple[int, int, bool]:
    """Save for the first time. Return how many bytes were prepared and used, and whether they are the same memory."""
    background_saves._memory = memory = StagingMemory()
    model, optimizer = large_run(layout)
    with mock.patch.object(run_directory, "_STAGING_MARGIN", 0):
        checkpointer = rankless.Checkpointer(folder, model=model, optimizer=optimizer, async_save=True, signals=())
        checkpointer.step(1)
    prepared = memory._prepared
    assert prepared is not None
    with mock.patch.object(memory, "take_buffer", wraps=memory.take_buffer) as take:
        checkpointer.step(2)
        checkpointer.save().wait()
    ((nbytes,), _) = take.call_args
    (idle,) = memory._idle
    return len(prepared._buffer), nbytes, np.shares_memory(idle, prepared._buffer)


@pytest.mark.parametrize(
    ("layout", "world_size"), [("plain", 1), ("plain", 2), ("ddp", 3), ("fsdp1", 2), ("fsdp2", 3), ("hsdp", 4)]
)
def test_the_first_save_uses_the_memory_that_was_prepared(
    layout: str, world_size: int, ranks: Ranks, tmp_path: Path
) -> None:
    for prepared, used, is_prepared in ranks(world_size, first_save, str(tmp_path), layout):
        assert used <= prepared <= used * _TOLERANCE**2
        assert is_prepared


def test_nothing_writes_to_a_buffer_that_a_save_has_taken() -> None:
    for _ in range(20):
        memory = StagingMemory()
        memory.prepare_buffer(64 * 2**20)
        buffer = memory.take_buffer(1000)
        buffer[:] = 7
        for thread in threading.enumerate():
            if thread.name == "rankless-prepare":
                thread.join(10)
        assert bool((buffer == 7).all())


def test_a_save_that_needs_more_allocates_it() -> None:
    memory = StagingMemory()
    memory.prepare_buffer(1000)
    assert len(memory.take_buffer(5_000_000)) >= 5_000_000
    assert memory._idle == []


def test_memory_that_is_not_there_is_not_prepared() -> None:
    memory = StagingMemory()
    memory.prepare_buffer(2**60)
    assert memory._prepared is None
    assert len(memory.take_buffer(1000)) == 1000


def test_nothing_is_prepared_after_the_first_save() -> None:
    memory = StagingMemory()
    memory.return_buffer(memory.take_buffer(1000))
    memory.prepare_buffer(1000)
    assert memory._prepared is None


def test_nothing_is_prepared_if_the_cgroup_has_no_room() -> None:
    memory = StagingMemory()
    with mock.patch.object(cgroup_memory, "free_cgroup_bytes", return_value=999):
        memory.prepare_buffer(1000)
    assert memory._prepared is None


class Unreadable(nn.Linear):
    def get_extra_state(self) -> Any:
        raise RuntimeError("not now")

    def set_extra_state(self, state: Any) -> None:
        raise NotImplementedError


def test_a_step_does_not_fail_if_the_size_is_unknown(tmp_path: Path) -> None:
    rankless.Checkpointer(tmp_path, model=Unreadable(2, 2), async_save=True, signals=()).step(1)


def test_nothing_is_prepared_for_adapters_alone(tmp_path: Path) -> None:
    background_saves._memory = memory = StagingMemory()
    rankless.Checkpointer(tmp_path, model=nn.Linear(2, 2), adapter_only=True, async_save=True, signals=()).step(1)
    assert memory._prepared is None


def test_saves_that_are_not_in_the_background_prepare_nothing(tmp_path: Path) -> None:
    background_saves._memory = memory = StagingMemory()
    checkpointer = rankless.Checkpointer(tmp_path, model=nn.Linear(2, 2), signals=())
    checkpointer.step(1)
    assert memory._prepared is None
