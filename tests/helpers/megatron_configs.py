"""Small models of transformers, one of each family that Megatron trains, and their tensors as Megatron has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.helpers.megatron_models import DIM, EXPERTS, FFN, GROUPS, HEADS, HIDDEN, LAYERS, POSITIONS, VOCAB

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

_MODERN: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": DIM,
    "rms_norm_eps": 1e-5,
    "attn_implementation": "eager",
}
_MOE: dict[str, Any] = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}

CONFIGS: Mapping[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_MODERN, tie_word_embeddings=False),
    "qwen2": lambda: transformers.Qwen2Config(**_MODERN, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**_MODERN, tie_word_embeddings=False),
    "mixtral": lambda: transformers.MixtralConfig(
        **_MODERN, **_MOE, tie_word_embeddings=False, sliding_window=None, rope_parameters=_ROPE
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_MODERN,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=FFN,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=POSITIONS,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        n_inner=FFN,
        activation_function="gelu",
        attn_implementation="eager",
        bos_token_id=0,
        eos_token_id=0,
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        use_parallel_residual=False,
        rope_parameters={**_ROPE, "partial_rotary_factor": 0.5},
        attn_implementation="eager",
    ),
}


def build_model(family: str) -> nn.Module:
    """A model with random weights."""
    torch.manual_seed(1)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(CONFIGS[family]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # norms that are all ones would hide mistakes
    return model


def fuse_tensors(state: Mapping[str, Tensor], padded: int = VOCAB) -> dict[str, Tensor]:
    """The tensors of a model as Megatron has them, layer by layer, from those that transformers has in memory."""
    return dict(_fuse_ends(state, padded)) | {
        f"decoder.layers.{layer}.{name}": tensor
        for layer in range(LAYERS)
        for name, tensor in _fuse_layer(_list_inner(state, layer))
    }


def _list_inner(state: Mapping[str, Tensor], layer: int) -> dict[str, Tensor]:
    found = {name: name.partition(f".{layer}.")[2] for name in state}
    return {inner: state[name] for name, inner in found.items() if inner and name.split(".")[2] == str(layer)}


def _fuse_ends(state: Mapping[str, Tensor], padded: int) -> Iterator[tuple[str, Tensor]]:
    for ends in (("wte", "embed_in", "embed_tokens"), ("lm_head",)):
        for name, tensor in state.items():
            if name.split(".")[-2] in ends:
                own = "output_layer" if ends == ("lm_head",) else "embedding.word_embeddings"
                yield f"{own}.weight", torch.cat([tensor, tensor.new_zeros(padded - len(tensor), HIDDEN)])
    for name, tensor in state.items():
        module, kind = name.split(".")[-2:]
        if module == "wpe":
            yield "embedding.position_embeddings.weight", tensor
        if module in {"norm", "ln_f", "final_layer_norm"}:
            yield f"decoder.final_layernorm.{kind}", tensor


def _fuse_layer(inner: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    renamed = {
        "ln_1": "input_layernorm",
        "ln_2": "pre_mlp_layernorm",
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "pre_mlp_layernorm",
        "attention.query_key_value": "self_attention.linear_qkv",
        "attention.dense": "self_attention.linear_proj",
        "self_attn.o_proj": "self_attention.linear_proj",
        "self_attn.q_norm": "self_attention.q_layernorm",
        "self_attn.k_norm": "self_attention.k_layernorm",
        "mlp.dense_h_to_4h": "mlp.linear_fc1",
        "mlp.dense_4h_to_h": "mlp.linear_fc2",
        "mlp.down_proj": "mlp.linear_fc2",
        "mlp.gate": "mlp.router",
    }
    for name, tensor in inner.items():
        module, _, kind = name.rpartition(".")
        if module in renamed:
            yield f"{renamed[module]}.{kind}", tensor
        if module in {"attn.c_proj", "mlp.c_fc", "mlp.c_proj"}:
            own = {"attn.c_proj": "self_attention.linear_proj", "mlp.c_fc": "mlp.linear_fc1"}
            yield f"{own.get(module, 'mlp.linear_fc2')}.{kind}", tensor.T if kind == "weight" else tensor
        if module == "attn.c_attn":
            yield f"self_attention.linear_qkv.{kind}", _join_heads(*tensor.T.chunk(3))
        if module == "self_attn.q_proj":
            parts = [inner[f"self_attn.{part}_proj.{kind}"] for part in "qkv"]
            yield f"self_attention.linear_qkv.{kind}", _join_heads(*parts)
        if module == "mlp.gate_proj":
            yield "mlp.linear_fc1.weight", torch.cat([tensor, inner["mlp.up_proj.weight"]])
        if name in {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}:
            kind = "linear_fc1" if name.endswith("gate_up_proj") else "linear_fc2"
            for expert, own_tensor in enumerate(tensor):
                yield f"mlp.experts.local_experts.{expert}.{kind}.weight", own_tensor


def _join_heads(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """For each group of queries: its queries, its key, its value."""
    groups = len(key) // DIM
    parts = [tensor.reshape(groups, -1, *tensor.shape[1:]) for tensor in (query, key, value)]
    return torch.cat(parts, 1).reshape(-1, *query.shape[1:])
