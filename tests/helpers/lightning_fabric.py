"""Fabric with rankless's strategies, on the ranks of the pool."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import nn

import rankless.lightning.fabric as ours


def shard(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=mesh["data_parallel"])
    return model


def strategy(layout: str, **options: Any) -> Any:
    if layout == "plain":
        return ours.SingleDeviceStrategy(device=torch.device("cpu"), **options)
    if layout == "ddp":
        return ours.DDPStrategy(**options)
    if layout == "fsdp1":
        return ours.FSDPStrategy(**options)
    size = dist.get_world_size()
    return ours.ModelParallelStrategy(shard, data_parallel_size=size, tensor_parallel_size=1, **options)


@contextlib.contextmanager
def fabric(layout: str, **options: Any) -> Iterator[Fabric]:
    rank, size = dist.get_rank(), dist.get_world_size()
    known = {"LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    with mock.patch.dict(os.environ, {key: str(value) for key, value in known.items()}):
        devices = 1 if layout == "plain" else size
        made = Fabric(
            accelerator="cpu", strategy=strategy(layout, **options), devices=devices, plugins=[LightningEnvironment()]
        )
        made.launch()
        yield made
