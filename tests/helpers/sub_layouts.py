"""Layouts over some of the ranks of a process group, as before and after a change of the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.helpers.layouts import LayoutRun, Net, make_run, parallelize, shard_fsdp2

#: Names of layouts. A grid has two rows if the number of ranks is even, else one.
SUB_LAYOUTS = ("plain", "fsdp", "tp", "fsdp_tp", "hsdp")


def make_sub_run(layout: str, ranks: Sequence[int]) -> LayoutRun | None:
    """A run over these ranks; ``None`` on other ranks. All ranks of the process group must call it."""
    rows = 2 if len(ranks) % 2 == 0 else 1
    grid = torch.tensor(ranks).view(rows, -1)
    names = {"fsdp_tp": ("dp", "tp"), "hsdp": ("replicate", "shard")}.get(layout, ("all",))
    mesh = DeviceMesh("cpu", grid if len(names) > 1 else grid.flatten(), mesh_dim_names=names)
    if dist.get_rank() not in ranks:
        return None
    if layout == "plain":
        return make_run(Net())
    if layout == "fsdp_tp":
        return make_run(shard_fsdp2(parallelize(Net(), mesh["tp"]), mesh["dp"]))
    return make_run(parallelize(Net(), mesh) if layout == "tp" else shard_fsdp2(Net(), mesh))
