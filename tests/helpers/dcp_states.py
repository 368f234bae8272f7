"""State dicts for ``torch.distributed.checkpoint``, sharded over all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

VALUES = {"step": 3, "list": [1, "two", None], "pair": (torch.arange(3), {"x": 2.5}), "groups": [{"lr": 0.1}]}


def make_tensors(step: int) -> dict[str, torch.Tensor]:
    return {
        "rows": torch.arange(35.0).view(7, 5) + step,
        "columns": torch.arange(24).view(4, 6).to(torch.bfloat16) + step,
        "scalar": torch.tensor(float(step)),
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False, True]),
    }


def make_state(step: int) -> dict[str, Any]:
    """Sharded over all ranks there are, in different ways."""
    tensors: dict[str, Any] = make_tensors(step)
    if dist.is_initialized() and dist.get_world_size() > 1:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        ways = {"rows": [Shard(0)], "columns": [Shard(1)], "flags": [Replicate()]}
        tensors |= {name: distribute_tensor(tensors[name], mesh, way) for name, way in ways.items()}
    return {"model": tensors, **VALUES, "step": step}
