"""Checkpoints in Megatron's format ``torch``: a folder for each tensor-parallel rank of two pipeline stages.

They are made by the rules of megatron-core's ``checkpointing.py``, for a Llama.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.helpers.megatron_models import ARGS, GROUP_SETTINGS

TP, STAGES = 2, {0: range(1), 1: range(1, 3)}
ARGUMENTS = {**ARGS["llama"], "tensor_model_parallel_size": TP, "pipeline_model_parallel_size": len(STAGES)}

#: Names of norms in the files, where they are modules of their own.
NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def divide(name: str, tensor: Tensor, rank: int) -> Tensor:
    """The part of a tensor-parallel rank. Of a gated layer it has rows of the gate, and then of the projection."""
    if name.endswith("linear_fc1.weight"):
        return torch.cat([half.chunk(TP)[rank] for half in tensor.chunk(2)])
    if name.endswith(("linear_qkv.weight", "word_embeddings.weight", "output_layer.weight")):
        return tensor.chunk(TP)[rank].clone()
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return tensor.chunk(TP, dim=1)[rank].clone()
    return tensor.clone()


def names_of_stage(names: list[str], stage: int) -> dict[str, str]:
    """The names in the file of a stage, whose layers count from zero, by the names in the model."""
    layers, result = STAGES[stage], {}
    for name in names:
        if name.startswith("decoder.layers."):
            _, _, layer, inner = name.split(".", 3)
            if int(layer) in layers:
                result[name] = f"decoder.layers.{int(layer) - layers[0]}.{NORMS.get(inner, inner)}"
        elif name.startswith("embedding.") == (stage == 0):
            result[name] = name
    return result


def save_ranks(path: Path, masters: dict[str, Tensor], moments: dict[str, Tensor], **changes: Any) -> Path:
    for stage in STAGES:
        names = names_of_stage(list(masters), stage)
        for rank in range(TP):
            parts = {name: divide(name, masters[name], rank) for name in names}
            flat = {"param": flatten(parts), "exp_avg": flatten({n: divide(n, moments[n], rank) for n in names})}
            folder = path / f"mp_rank_{rank:02d}_{stage:03d}"
            folder.mkdir(parents=True)
            model = {names[name]: part.bfloat16() for name, part in parts.items()}
            root = {
                "args": Namespace(**{**ARGUMENTS, **changes}),
                "iteration": 7,
                "model": model,
                "optimizer": {"optimizer": {"param_groups": GROUP_SETTINGS}},
            }
            torch.save(root, folder / "model_optim_rng.pt")
            dtypes = torch.bfloat16, torch.float32
            torch.save({0: {dtypes: flat}, "buckets_coalesced": True}, folder / "distrib_optim.pt")
    return path


def flatten(parts: dict[str, Tensor]) -> Tensor:
    """The parts in reverse order, each at a multiple of 64 elements."""
    rows: list[Tensor] = []
    for part in reversed(parts.values()):
        rows += [torch.full((-sum(map(len, rows)) % 64,), torch.nan), part.flatten()]
    return torch.cat(rows)
