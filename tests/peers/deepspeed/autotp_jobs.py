"""What the ranks of a job with AutoTP do: ``torchrun -m tests.peers.deepspeed.autotp_jobs RUNS.json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.module_inject.layers import GatherReplacedLayerParams
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM


def run(spec: dict[str, Any]) -> None:
    """Train a model of two tensor-parallel ranks and save it, and what DeepSpeed says that each rank has."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 32}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **spec["config"]))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": spec["stage"]},
        "tensor_parallel": {"autotp_size": 2},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": spec["dtype"] == "bf16"},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    torch.manual_seed(5 + dist.get_rank() // 2)
    for _ in range(3):
        tokens = torch.randint(0, 64, (1, 8))
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    engine.save_checkpoint(spec["save"])
    tensors = {}
    for name, parameter in engine.module.named_parameters():
        tensors |= {
            f"master/{name}": safe_get_full_fp32_param(parameter),
            f"exp_avg/{name}": safe_get_full_optimizer_state(parameter, "exp_avg"),
            f"exp_avg_sq/{name}": safe_get_full_optimizer_state(parameter, "exp_avg_sq"),
        }
        is_divided = hasattr(parameter, "gather_params")
        with GatherReplacedLayerParams([parameter], engine.module, enabled=is_divided):
            tensors[f"whole/{name}"] = parameter.detach().clone()
    found = {name: value.contiguous().clone() for name, value in tensors.items() if value is not None}
    save_file(found, f"{spec['save']}.rank{dist.get_rank()}.safetensors")
    engine.destroy()


if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    for one in json.loads(Path(sys.argv[1]).read_text()):
        run(one)
    dist.destroy_process_group()
