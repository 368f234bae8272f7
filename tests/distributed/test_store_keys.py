"""Tests that the job's key-value store does not grow from save to save."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import holdfast
from tests.distributed.test_multiple_hosts import on_hosts
from tests.helpers.pool import Ranks


def count_keys() -> int:
    """Count the keys once the ones in the background are deleted."""
    dist.barrier()
    time.sleep(0.5)
    keys: int = dist.distributed_c10d._get_default_store().num_keys()
    dist.barrier()
    return keys


def save_often(path: str, ranks_per_host: int, async_save: bool) -> int:
    counts, state = [], {"w": torch.arange(5000.0)}
    hosts: AbstractContextManager[None] = on_hosts(ranks_per_host) if ranks_per_host else nullcontext()
    with hosts:
        for save in range(12):
            holdfast.save_checkpoint(path, f"s{save}", state, async_save=async_save, num_kept_ckpts=1)
            if save % 8 == 3:
                holdfast.finalize()
                counts.append(count_keys())
    return counts[1] - counts[0]


@pytest.mark.parametrize(("ranks_per_host", "async_save"), [(0, False), (0, True), (1, False)])
def test_saves_leave_no_keys(ranks: Ranks, tmp_path: Path, ranks_per_host: int, async_save: bool) -> None:
    assert all(growth <= 3 for growth in ranks(3, save_often, str(tmp_path), ranks_per_host, async_save))
