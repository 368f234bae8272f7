"""The checkpoints that DeepSpeed wrote, and what the training held when it saved them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

#: The cases whose optimizer has the names of parameters.
NAMED = (
    *("z1_w2_fp32", "z1_w2_bf16_acc32", "z2_w2_bf16", "z2_w4_fp16", "z3_w2_fp32", "z3_w4_bf16", "z0_w2_bf16"),
    *("pipe_p2_d1_fp32", "pipe_p2_d2_z1_bf16", "moe_w2_ep2_z1_fp32", "z1_w2_fp32_universal", "z3_w2_fp32_universal"),
    *("acc_ds_z2_w2", "trainer_ds_z2_w2"),
)

#: The cases with the details of DeepSpeed's engine in ``oracle.json``.
DETAILED = tuple(case for case in NAMED if not case.startswith(("pipe", "moe", "acc", "trainer")))

#: The cases whose model is computed in 16 bits, with separate weights in the files.
SIXTEEN_BIT = ("z1_w2_bf16_acc32", "z2_w2_bf16", "z2_w4_fp16", "z0_w2_bf16", "pipe_p2_d2_z1_bf16")


@dataclass
class Oracle:
    """What a training held: tensors by kind and name, and other values."""

    folder: Path
    tensors: dict[str, dict[str, torch.Tensor]]
    values: dict[str, Any]

    @classmethod
    def load(cls, root: Path, case: str) -> Oracle:
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        for key, tensor in load_file(root / case / "oracle.safetensors").items():
            kind, _, name = key.partition("/")
            tensors.setdefault(kind, {})[name] = tensor
        values = json.loads((root / case / "oracle.json").read_text())
        return cls(root / case / "ckpt" / values.get("folder", ""), tensors, values)

    @property
    def tag(self) -> Path:
        """The folder of the tag."""
        return next(path for path in self.folder.iterdir() if path.is_dir())

    @property
    def tied(self) -> dict[str, str]:
        return dict(self.values.get("tied", {}))

    @property
    def model(self) -> dict[str, torch.Tensor]:
        """The tensors of a model that trains on from the master weights."""
        masters = self.tensors.get("master", {})
        weights = {name: masters.get(name, tensor) for name, tensor in self.tensors["weights"].items()}
        tied = {name: weights[stored] for name, stored in self.tied.items()}
        return {**weights, **tied, **self.tensors.get("buffer", {})}

    def build_model(self) -> nn.Module:
        """A model with the names and shapes of the training's, of zeros."""
        root = nn.Module()
        for name, tensor in self.model.items():
            *path, last = name.split(".")
            module = root
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            if name in self.tensors.get("buffer", {}):
                module.register_buffer(last, torch.zeros_like(tensor))
            else:
                parameter = nn.Parameter(torch.zeros_like(tensor), requires_grad=tensor.is_floating_point())
                module.register_parameter(last, parameter)
        for name, stored in self.tied.items():
            module_name, _, last = name.rpartition(".")
            setattr(root.get_submodule(module_name), last, root.get_parameter(stored))
        return root

    def build_optimizer(self, model: nn.Module) -> torch.optim.AdamW:
        """AdamW over the parameters that were trained, in their groups, with settings that a load must replace."""
        return torch.optim.AdamW(
            [{"params": [model.get_parameter(name) for name in names]} for names in self.trained], lr=99.0
        )

    @property
    def trained(self) -> list[list[str]]:
        """The names of the parameters in each group."""
        groups = self.values.get("groups", [])
        if groups and "params" in groups[0]:
            return [group["params"] for group in groups]
        names = list(self.tensors["exp_avg"])
        if len(groups) <= 1:
            return [names]
        experts = [name for name in names if "deepspeed_experts" in name]
        return [[name for name in names if name not in experts], experts]
