"""Small PEFT models of many kinds, with random adapters, in the layouts of a distributed training."""

from __future__ import annotations

from collections.abc import Callable

import peft
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

TARGETS = ["q_proj", "o_proj"]

#: The task; it makes PEFT wrap the model in a class of its own.
LM = "CAUSAL_LM"


def make_base() -> transformers.LlamaForCausalLM:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)


def lora(**options: object) -> peft.LoraConfig:
    return peft.LoraConfig(**{"r": 4, "target_modules": TARGETS, "task_type": LM, **options})


#: Kinds of adapters whose tensors are all parameters or buffers.
STORED: dict[str, Callable[[], peft.PeftConfig]] = {
    "lora": lora,
    "lora without a task": lambda: lora(task_type=None),
    "lora with biases": lambda: lora(bias="all"),
    "lora of embeddings": lambda: lora(target_modules=["q_proj", "embed_tokens", "lm_head"]),
    "lora with whole modules": lambda: lora(modules_to_save=["lm_head", "norm"]),
    "lora with tokens": lambda: lora(trainable_token_indices={"embed_tokens": [1, 2]}),
    "lora by a pattern": lambda: lora(target_modules=r".*\.(q|v)_proj", rank_pattern={"v_proj": 2}),
    "dora": lambda: lora(use_dora=True),
    "ia3": lambda: peft.IA3Config(
        target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"], task_type=LM
    ),
    "prompt tuning": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type=LM),
    "prefix tuning": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, task_type=LM),
    "multitask prompts": lambda: peft.MultitaskPromptTuningConfig(num_virtual_tokens=3, num_tasks=2, task_type=LM),
    "adalora": lambda: peft.AdaLoraConfig(target_modules=TARGETS, total_step=10, task_type=LM),
    "loha": lambda: peft.LoHaConfig(r=2, target_modules=TARGETS, task_type=LM),
    "lokr": lambda: peft.LoKrConfig(r=2, target_modules=TARGETS, task_type=LM),
    "oft": lambda: peft.OFTConfig(oft_block_size=4, target_modules=TARGETS, task_type=LM),
    "hra": lambda: peft.HRAConfig(r=2, target_modules=TARGETS, task_type=LM),
    "vera": lambda: peft.VeraConfig(r=2, target_modules=TARGETS, task_type=LM),
    "vera without projections": lambda: peft.VeraConfig(
        r=2, target_modules=TARGETS, save_projection=False, task_type=LM
    ),
    "vblora": lambda: peft.VBLoRAConfig(
        r=2, target_modules=TARGETS, num_vectors=4, vector_length=16, topk=2, task_type=LM
    ),
    "fourierft": lambda: peft.FourierFTConfig(n_frequency=4, target_modules=TARGETS, task_type=LM),
    "layer norms": lambda: peft.LNTuningConfig(target_modules=["norm"], task_type=LM),
    "tokens": lambda: peft.TrainableTokensConfig(token_indices=[1, 2], target_modules=["embed_tokens"], task_type=LM),
}

#: Kinds of adapters of which PEFT computes what it stores.
COMPUTED: dict[str, Callable[[], peft.PeftConfig]] = {
    "projected prefixes": lambda: peft.PrefixTuningConfig(
        num_virtual_tokens=3, prefix_projection=True, encoder_hidden_size=8, task_type=LM
    ),
    "p-tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8, task_type=LM),
    "vblora of the best": lambda: peft.VBLoRAConfig(
        r=2,
        target_modules=TARGETS,
        num_vectors=4,
        vector_length=16,
        topk=2,
        save_only_topk_weights=True,
        task_type=LM,
    ),
}


def make_peft(kind: str, seed: int = 0) -> peft.PeftModel:
    """A PEFT model whose adapters have random values from ``seed``; the base model is always the same."""
    model = peft.get_peft_model(make_base(), {**STORED, **COMPUTED}[kind]())
    return randomize(model, seed)


def randomize(model: peft.PeftModel, seed: int) -> peft.PeftModel:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    return model


def as_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=True)


def as_fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def as_fsdp2(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def as_tensor_parallel(model: nn.Module) -> nn.Module:
    """Divide queries by columns and outputs by rows, with the matrices of LoRA next to them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {
        "q_proj.base_layer": ColwiseParallel(),
        "q_proj.lora_B.default": ColwiseParallel(),
        "o_proj.base_layer": RowwiseParallel(),
        "o_proj.lora_A.default": RowwiseParallel(),
    }
    for layer in model.get_base_model().model.layers:
        names = {name for name, _ in layer.self_attn.named_modules()}
        parallelize_module(layer.self_attn, mesh, {name: style for name, style in plan.items() if name in names})
    return model


LAYOUTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "ddp": as_ddp,
    "fsdp1": as_fsdp1,
    "fsdp2": as_fsdp2,
    "tp": as_tensor_parallel,
}
