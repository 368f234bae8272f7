"""Checkpoints that Accelerate 1.15.0 and transformers 5.23.0 wrote, and what the live runs had in memory then."""

from __future__ import annotations

import json
import random
import tarfile
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

import rankless

ACCELERATE = ["acc_plain_w1", "acc_fsdp2_w2"]
TRAINER = ["trainer_plain_w1", "trainer_plain_w2", "trainer_fsdp2_w2"]
CASES = [*ACCELERATE, *TRAINER]
DEEPSPEED = ["acc_ds_z2_w2", "trainer_ds_z2_w2"]
RANKS = {case: int(case[-1]) for case in CASES}

#: Their optimizers have parameters by name, not by number.
SHARDED = ["acc_fsdp2_w2", "trainer_fsdp2_w2"]

STATES = ("exp_avg", "exp_avg_sq", "step")


def unpack_fixtures(folder: Path) -> Path:
    with tarfile.open(Path(__file__).parent / "checkpoints.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


class SavedRun:
    """A checkpoint, and an oracle of it: tensors of the live run, settings of its optimizer."""

    def __init__(self, folder: Path, case: str) -> None:
        self.case, self.folder = case, folder / case / "ckpt"
        self._tensors = load_file(folder / case / "oracle.safetensors")
        self._notes = json.loads((folder / case / "oracle.json").read_text())

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The tensors of the model. The oracle of Accelerate with DeepSpeed lacks its buffers, which are constants."""
        buffers = {"counts": torch.arange(5), "scale": torch.linspace(0.5, 1.5, 10)}
        return self._by_prefix("weights/") | (buffers if self.case == "acc_ds_z2_w2" else {})

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The settings of each parameter group, with ``params``: the names in the order of the optimizer."""
        groups: list[dict[str, Any]] = self._notes["groups"]
        return groups

    @cached_property
    def params(self) -> list[str]:
        return [name for group in self.groups for name in group["params"]]

    @property
    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """The moments of each parameter of the optimizer."""
        first, second = self._by_prefix("exp_avg/"), self._by_prefix("exp_avg_sq/")
        return {name: {"exp_avg": value, "exp_avg_sq": second[name]} for name, value in first.items()}

    @cached_property
    def states(self) -> dict[str, dict[str, torch.Tensor]]:
        """The states of each parameter of the optimizer."""
        steps: dict[str, float] = self._notes["step"]
        return {name: {**moments, "step": torch.tensor(steps[name])} for name, moments in self.moments.items()}

    @property
    def scheduler(self) -> dict[str, Any]:
        """The state of the scheduler, of the file, which ``torch.load`` reads."""
        file = next(self.folder.glob("scheduler.*"))
        loaded: dict[str, Any] = torch.load(file, weights_only=True)
        return loaded

    def generators(self, rank: int) -> dict[str, Any]:
        """The states of Python's, NumPy's and torch's generator, of the file, which ``torch.load`` reads."""
        names = [f"random_states_{rank}.pkl", f"rng_state_{rank}.pth", *(["rng_state.pth"] if rank == 0 else [])]
        file = next(self.folder / name for name in names if (self.folder / name).exists())
        loaded = torch.load(file, weights_only=False)
        keys = (("random_state", "python"), ("numpy_random_seed", "numpy"), ("torch_manual_seed", "cpu"))
        return {short: loaded.get(long, loaded.get(short)) for long, short in keys}

    def _by_prefix(self, prefix: str) -> dict[str, torch.Tensor]:
        return {name.removeprefix(prefix): value for name, value in self._tensors.items() if name.startswith(prefix)}

    def make_model(self) -> nn.Module:
        """A model with the parameters and buffers of the run, filled with other numbers."""
        model = nn.Module()
        buffers = self.weights.keys() - self.moments.keys()
        for name, value in self.weights.items():
            owner, _, last = name.rpartition(".")
            parent = model
            for part in filter(None, owner.split(".")):
                if not hasattr(parent, part):
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            other = torch.full_like(value, 7)
            if name in buffers:
                parent.register_buffer(last, other)
            else:
                parent.register_parameter(last, nn.Parameter(other))
        return model

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """An optimizer with the groups of the run, and another learning rate."""
        parameters = dict(model.named_parameters())
        return torch.optim.AdamW([{"params": [parameters[name] for name in group["params"]]} for group in self.groups])


def make_scheduler(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def restore_generators(path: Path) -> dict[str, Any]:
    result = rankless.restore(path, rng=True)
    assert result.exact == ("rng", "user_content")
    return {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}  # noqa: NPY002
