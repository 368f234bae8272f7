"""The state that campaigns save: a function of the step, so that a reader knows the expected values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from rankless.ondisk.hidden_names import parse_hidden_name
from rankless.run import records_folder

#: Sharded by rows, each rank has one contiguous range; by columns, many short ones, which are exchanged between ranks;
#: a replica is whole on all ranks.
_SHARDED = {"rows": (120, 500, 0), "left": (60, 600, 1), "middle": (60, 600, 1), "right": (60, 600, 1)}
_COPIED = {"copy": (20_000,), "scalar": ()}


class ViolationError(Exception):
    """A broken promise."""


def build_tensors(step: int) -> dict[str, torch.Tensor]:
    """Return all tensors of a step, unsharded."""
    shapes = {name: shape[:2] for name, shape in _SHARDED.items()} | _COPIED
    return {name: _build_tensor(name, shape, step) for name, shape in shapes.items()}


def _build_tensor(name: str, shape: tuple[int, ...], step: int) -> torch.Tensor:
    count = 1
    for size in shape:
        count *= size
    return (torch.arange(count, dtype=torch.float32) + 1e5 * step + len(name)).reshape(shape)


def build_shards(step: int) -> dict[str, torch.Tensor]:
    """Return this rank's shards of a step's tensors."""
    whole = build_tensors(step)
    if not dist.is_initialized():
        return whole
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = DeviceMesh("cpu", list(range(size)), _init_backend=False)
    for name, (*_, dim) in _SHARDED.items():
        shard = whole[name].chunk(size, dim)[rank].contiguous()
        whole[name] = DTensor.from_local(shard, mesh, [Shard(dim)], run_check=False)
    return whole


def build_user_content(step: int) -> dict[str, Any]:
    """Return the user content of a step."""
    return {"step": step, "history": list(range(step)), "blob": torch.full((2000,), float(step))}


def has_values_of(tensors: dict[str, torch.Tensor], step: int) -> bool:
    """Return whether this rank's tensors are those of a step, bit for bit."""
    return all(
        torch.equal(_get_local(tensors[name]), _get_local(tensor)) for name, tensor in build_shards(step).items()
    )


def _get_local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def read_checkpoints(run: Path) -> dict[str, int]:
    """Read the step of each checkpoint by tag, without rankless. Raises ``ViolationError`` if one is not whole."""
    other = {records_folder.JOURNAL, records_folder.OLDER_JOURNAL, records_folder.FOLDER}
    folders = sorted(e for e in run.iterdir() if parse_hidden_name(e.name) is None and e.name not in other)
    return {folder.name: _read_step(folder) for folder in folders}


def _read_step(folder: Path) -> int:
    try:
        step = json.loads((folder / "state.json").read_bytes())["user_content"]["step"]
        tensors = load_file(folder / "model/model.safetensors")
        (blob,) = load_file(folder / "state.safetensors").values()
        json.loads((folder / "manifest.json").read_bytes())
    except Exception as error:
        raise ViolationError(f"{folder} is visible, and not whole: {error!r}") from error
    whole = build_tensors(step)
    if tensors.keys() != whole.keys() or not all(torch.equal(tensors[name], whole[name]) for name in whole):
        raise ViolationError(f"{folder} is torn: it says step {step}, and has other tensors")
    if not torch.equal(blob, torch.full((2000,), float(step))):
        raise ViolationError(f"{folder} is torn: it says step {step}, and has another step's content")
    return int(step)


def list_hidden_names(run: Path) -> list[str]:
    """Return the hidden directories that saves left."""
    return sorted(entry.name for entry in run.iterdir() if parse_hidden_name(entry.name) is not None)
