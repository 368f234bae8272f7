"""Folders of NeMo 2, Megatron-Bridge and Megatron-FSDP, with the same model and optimizer."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner

from tests.helpers.megatron_models import ARGS, GROUP_SETTINGS, build_tensors, stack_tensors

MASTERS = build_tensors(ARGS["qwen3"])
STATES = {"param": MASTERS, "exp_avg": build_tensors(ARGS["qwen3"], 1), "exp_avg_sq": build_tensors(ARGS["qwen3"], 2)}

#: The configuration of the model, as both write it: with Python's names, which are never imported.
MODEL = """\
  _target_: {target}
  activation_func:
    _call_: false
    _target_: torch.nn.functional.silu
  add_bias_linear: false
  add_qkv_bias: false
  ffn_hidden_size: 48
  gated_linear_unit: true
  hidden_size: 32
  init_method: !!python/object/apply:os.system ['touch {mark}']
  kv_channels: 8
  layernorm_zero_centered_gamma: false
  normalization: RMSNorm
  num_attention_heads: 4
  num_layers: 3
  num_moe_experts: null
  num_query_groups: 2
  params_dtype:
    _call_: false
    _target_: torch.bfloat16
  position_embedding_type: rope
  qk_layernorm: true
  rotary_percent: 1.0
  share_embeddings_and_output_weights: false
  vocab_size: 60
"""


def save_folder(folder: Path, prefix: str, common: Mapping[str, Any]) -> Path:
    """Write an iteration of ``torch_dist``."""
    entries: dict[str, Any] = {f"{prefix}{key}": tensor for key, tensor in stack_tensors(MASTERS).items()}
    for state, tensors in STATES.items():
        entries |= {f"optimizer.state.{state}.{prefix}{key}": own for key, own in stack_tensors(tensors).items()}
    dcp.save(entries, checkpoint_id=folder, planner=DefaultSavePlanner(flatten_state_dict=False), no_dist=True)
    torch.save(dict(common), folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return folder


OPTIMIZER = {"param_state_sharding_type": "fully_reshardable", "optimizer": {"param_groups": GROUP_SETTINGS}}


def save_nemo(folder: Path, model: str = MODEL) -> Path:
    common = {"global_step": 7, "epoch": 0, "state_dict": {}, "optimizer": [OPTIMIZER], "optimizer_states": {}}
    save_folder(folder / "weights", "module.", common)
    (folder / "context").mkdir()
    text = model.format(target="nemo.collections.llm.gpt.model.llama.Llama3Config", mark=folder / "executed")
    (folder / "context/model.yaml").write_text(f"_target_: nemo.collections.llm.LlamaModel\nconfig:\n{text}")
    (folder / "context/io.json").write_text("{}")
    return folder


def save_bridge(folder: Path, model: str = MODEL) -> Path:
    iteration = folder / "iter_0000007"
    save_folder(iteration, "", {"iteration": 7, "checkpoint_version": 3.0, "optimizer": OPTIMIZER})
    text = model.format(target="megatron.bridge.models.qwen.Qwen3ModelProvider", mark=folder / "executed")
    (iteration / "run_config.yaml").write_text(f"checkpoint:\n  save_optim: true\nmodel:\n{text}")
    state = {"step": torch.tensor(7), "consumed_train_samples": torch.tensor(56), "do_train": torch.tensor(True)}
    torch.save(state, iteration / "train_state.pt")
    torch.save(state, folder / "latest_train_state.pt")
    return folder


def save_fsdp(folder: Path) -> Path:
    """Write an iteration of ``fsdp_dtensor``."""
    dcp.save(build_fsdp_tree(), checkpoint_id=folder, no_dist=True)
    return folder


def build_fsdp_tree() -> dict[str, Any]:
    """What Megatron-FSDP saves, with the names that it gives its tensors."""
    state: dict[str, dict[str, Tensor]] = {}
    for kind in ("exp_avg", "exp_avg_sq"):
        for name, tensor in _halve(STATES[kind]).items():
            state.setdefault(f"module.module.module.{name}", {"step": torch.tensor(5.0)})[kind] = tensor
    meta = {f"module.module.module.{name}": GROUP_SETTINGS[int(own.ndim == 1)] for name, own in MASTERS.items()}
    return {
        "args": Namespace(**ARGS["qwen3"]),
        "checkpoint_version": 3.0,
        "iteration": 7,
        "model": {f"module.{name}": tensor for name, tensor in _halve(MASTERS).items()},
        "optimizer": {"state": state, "param_to_group_meta": meta},
    }


def _halve(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    halved: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        is_gated = name.endswith("linear_fc1.weight")
        halved |= dict(zip((f"{name}_w", f"{name}_v"), tensor.chunk(2), strict=True)) if is_gated else {name: tensor}
    return halved
