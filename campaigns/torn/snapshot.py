"""The oracle: a copy of a run's state, made with torch and Python only, and its comparison with a checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

import rankless


class LiveStateful:
    """An object whose state dict is the live state itself, not a copy."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"mean": torch.zeros(500), "counts": [0, 0], "table": np.zeros((3, 7))}

    def state_dict(self) -> dict[str, Any]:
        """Return the live state."""
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the state."""
        self.state = state


class TrainingState(Protocol):
    """The state of a run."""

    @property
    def model(self) -> nn.Module:
        """The model."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Its optimizer."""

    @property
    def scheduler(self) -> torch.optim.lr_scheduler.LRScheduler:
        """The learning-rate scheduler."""

    tracker: LiveStateful
    loader: LiveStateful
    content: dict[str, Any]


class Snapshot:
    """A copy of all of a run's state, made with torch and Python only."""

    def __init__(self, run: TrainingState) -> None:
        names = {id(p): name for name, p in run.model.named_parameters()}
        live = {f"model/{name}": tensor.detach() for name, tensor in run.model.state_dict().items()}
        for p, states in run.optimizer.state.items():
            live |= {f"optimizer/{names[id(p)]}/{name}": value for name, value in states.items()}
        self._live = live
        self._tensors = {name: get_local(tensor).clone() for name, tensor in live.items()}
        groups = [{k: v for k, v in group.items() if k != "params"} for group in run.optimizer.param_groups]
        self._values = copy.deepcopy(
            {
                "groups": groups,
                "scheduler": run.scheduler.state_dict(),
                "user_content": run.content,
                "stateful": {"tracker": run.tracker.state},
            }
        )
        self._own = copy.deepcopy({"content": run.content, "dataloader": run.loader.state})
        self._rng = torch.get_rng_state()

    def find_differences(self, folder: Path) -> Iterator[str]:
        """Return the names of values that differ in a checkpoint."""
        model, optimizer = (
            load_file(folder / "model/model.safetensors"),
            load_file(folder / "optimizer/optimizer.safetensors"),
        )
        stored = {f"model/{name}": tensor for name, tensor in model.items()}
        stored |= {f"optimizer/{name}": tensor for name, tensor in optimizer.items()}
        yield from stored.keys() ^ self._tensors.keys()
        for name in stored.keys() & self._tensors.keys():
            if not torch.equal(_take_shard(stored[name], self._live[name]), self._tensors[name]):
                yield name
        restored = rankless.restore(
            folder, dataloader=(loader := LiveStateful()), stateful={"tracker": LiveStateful()}, rng=True
        )
        values = dict(rankless.open(folder).values)
        groups = [group["settings"] for group in values.pop("optimizer")["groups"]]
        values |= {"groups": groups, "scheduler": values["scheduler"]["state"]}
        yield from (name for name in self._values if not _are_equal(self._values[name], values[name]))
        expected = {"content": restored.per_rank_content, "dataloader": loader.state}
        yield from (f"a rank's {name}" for name in expected if not _are_equal(self._own[name], expected[name]))
        if not torch.equal(torch.get_rng_state(), self._rng):
            yield "the state of the random generator"


def _are_equal(left: Any, right: Any) -> bool:
    """Return whether two trees are equal, types included."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_are_equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(_are_equal, left, right))
    return bool(left == right)


def _take_shard(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor in the layout of another."""
    if not isinstance(like, DTensor):
        return whole
    shard: torch.Tensor = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()
    return shard


def get_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor."""
    shard: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return shard
