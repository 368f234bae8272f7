"""Tiny models with random weights: of architectures that are always tried, and of others that are drawn."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

#: Settings of all models that have them. The vocabulary is padded by vLLM. Its kernels need heads of 64 elements.
_BASE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 250,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

#: The settings of the base that a family has under other names, or not.
_OWN_NAMES = dict.fromkeys(
    ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"]
)
_WIDTH = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}

_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}

_DEEPSEEK = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}

#: The class of the configuration, and its settings besides the base; ``None`` leaves one out.
_ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "qwen2": ("Qwen2Config", {"head_dim": None, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"tie_word_embeddings": False}),
    "gemma2": ("Gemma2Config", {}),
    "gemma3_text": ("Gemma3TextConfig", {}),
    "phi3": ("Phi3Config", {"head_dim": None}),
    "gptneox": ("GPTNeoXConfig", {"head_dim": None, "num_key_value_heads": None}),
    "gpt2": ("GPT2Config", {**_OWN_NAMES, "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "opt": (
        "OPTConfig",
        {**_OWN_NAMES, **_WIDTH, "ffn_dim": 512, "word_embed_proj_dim": 256},
    ),
    "falcon": (
        "FalconConfig",
        {**_OWN_NAMES, **_WIDTH, "new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False, "bias": False},
    ),
    "bloom": ("BloomConfig", {**_OWN_NAMES, "hidden_size": 256, "n_layer": 2, "n_head": 4}),
    "olmo2": ("Olmo2Config", {}),
    "granite": ("GraniteConfig", {}),
    "starcoder2": ("Starcoder2Config", {"head_dim": None}),
    "cohere": ("CohereConfig", {"head_dim": None}),
    "stablelm": ("StableLmConfig", {"head_dim": None}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeConfig", _EXPERTS),
    "qwen2_moe": ("Qwen2MoeConfig", {"head_dim": None, "shared_expert_intermediate_size": 256, **_EXPERTS}),
    "olmoe": ("OlmoeConfig", {"num_experts": 8, "num_experts_per_tok": 2}),
    "deepseek_v2": ("DeepseekV2Config", {"head_dim": None, "n_group": 1, "topk_group": 1, **_DEEPSEEK}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {"head_dim": None, "n_group": 2, "topk_group": 1, "topk_method": "noaux_tc", **_DEEPSEEK},
    ),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 256}),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            "num_hidden_layers": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "mamba": ("MambaConfig", {**_OWN_NAMES, **_WIDTH, "state_size": 16}),
    "mamba2": (
        "Mamba2Config",
        {**_OWN_NAMES, **_WIDTH, "num_heads": 8, "head_dim": 64, "n_groups": 2, "state_size": 16},
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "shared_expert_intermediate_size": 128,
            **_EXPERTS,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            "head_dim": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_n_groups": 2,
            "mamba_d_state": 16,
            "shared_intermediate_size": 256,
        },
    ),
    # Blocks of 128 x 128 elements have a scale: each rank of two needs whole ones.
    "llama_wide": ("LlamaConfig", {"hidden_size": 512, "num_key_value_heads": 4, "num_attention_heads": 8}),
}

#: What is stored for the weight ``k`` with the value ``v`` of a linear layer.
_Quantize = Callable[[str, torch.Tensor], dict[str, torch.Tensor]]


def _codes(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int64).to(torch.int32)


def _fp8_blocks(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scales = torch.rand(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
    return {name: (weight * 100).to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}


def _fp8_tensor(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scales = {f"{name}_scale": torch.rand(()), name.replace("weight", "input_scale"): torch.rand(())}
    return {name: (weight * 100).to(torch.float8_e4m3fn), **scales}


def _awq(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    (rows, columns), part = weight.shape, name.removesuffix(".weight")
    return {
        f"{part}.qweight": _codes(columns, rows // 8),
        f"{part}.qzeros": _codes(columns // 128, rows // 8),
        f"{part}.scales": torch.rand(columns // 128, rows).half(),
    }


def _gptq(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    (rows, columns), part = weight.shape, name.removesuffix(".weight")
    return {
        f"{part}.qweight": _codes(columns // 8, rows),
        f"{part}.qzeros": _codes(columns // 128, rows // 8),
        f"{part}.scales": torch.rand(columns // 128, rows).half(),
        f"{part}.g_idx": (torch.arange(columns) // 128).to(torch.int32),
    }


_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}

#: The model that is quantised, how, and what its configuration says of it.
_QUANTISED: dict[str, tuple[str, _Quantize, dict[str, Any]]] = {
    "llama_fp8_block": ("llama_wide", _fp8_blocks, _BLOCKS),
    "llama_fp8_tensor": ("llama", _fp8_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
    "llama_awq": (
        "llama",
        _awq,
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    ),
    "llama_gptq": (
        "llama",
        _gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    ),
}

#: The models that are always tried.
ALWAYS = [*_ARCHITECTURES, *_QUANTISED]


def write_model(name: str, root: Path) -> Path:
    """Write a model that is always tried into a folder in ``root``, and return the folder."""
    if name in _QUANTISED:
        return _write_quantised(root / name, *_QUANTISED[name])
    kind, changes = _ARCHITECTURES[name]
    settings = {key: value for key, value in {**_BASE, **changes}.items() if value is not None}
    return _write(
        AutoModelForCausalLM.from_config(getattr(transformers, kind)(**settings), dtype=torch.bfloat16), root / name
    )


def write_drawn_models(seed: int, count: int, root: Path) -> Iterator[Path]:
    """Write models of so many further architectures of vLLM's registry that can be built; yield their folders."""
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS  # noqa: PLC0415 - takes seconds

    names = sorted(name for name in _TEXT_GENERATION_MODELS if hasattr(transformers, name))
    random.Random(seed).shuffle(names)
    tried = {kind.removesuffix("Config") + "ForCausalLM" for kind, _ in _ARCHITECTURES.values()}
    written = 0
    for name in names:
        if written == count:
            return
        if name not in tried and (folder := _try_to_write(name, root)) is not None:
            written += 1
            yield folder


def _try_to_write(name: str, root: Path) -> Path | None:
    """Write a model of an architecture whose settings are not known. Return ``None`` if it cannot be built so."""
    model_class = getattr(transformers, name)
    try:
        config = model_class.config_class(**_BASE, **_EXPERTS, num_local_experts=8)
        with torch.device("meta"):
            if sum(parameter.numel() for parameter in model_class._from_config(config).parameters()) > 20_000_000:
                return None
        return _write(model_class._from_config(config, dtype=torch.bfloat16), root / name)
    except Exception:  # noqa: BLE001 - families check their settings in ways of their own
        return None


def _write(model: Any, folder: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02 + 0.01)
    model.save_pretrained(folder)
    return folder


def _write_quantised(folder: Path, base: str, quantize: _Quantize, description: dict[str, Any]) -> Path:
    torch.manual_seed(0)
    source = write_model(base, folder.parent)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        is_linear = name.startswith("model.layers") and name.endswith("_proj.weight")
        tensors |= quantize(name, tensor) if is_linear else {name: tensor}
    folder.mkdir(exist_ok=True)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": description}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
