"""Megatron's arguments for a model, from the ``config.json`` of transformers.

:mod:`rankless.megatron.writer.megatron_source` calls it on each rank that opens the source. A configuration of a model
that Megatron does not have must be refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rankless.errors import FormatError, InvalidArgumentError
from rankless.megatron.reader.hf_families import FAMILIES, Family
from rankless.megatron.reader.model_args import ModelArgs

#: Model types with the tensors of another one.
_SAME = {"mistral": "llama"}

#: Advice for a tensor that has no place in Megatron.
ADVICE = "leave tensors out with exclude (--exclude), or name them as this family does with rename (--rename)"


@dataclass(frozen=True)
class _Config:
    """The entries of a ``config.json``."""

    values: Mapping[str, Any]
    source: str

    def get(self, name: str, default: Any = None) -> Any:
        """Return an entry, or the default if it is missing or ``None``."""
        value = self.values.get(name)
        return default if value is None else value

    def size(self, name: str, default: int | None = None) -> int:
        """Return a positive integer. Raises ``FormatError`` if the entry is something else."""
        value = self.get(name, default)
        if type(value) is not int or value <= 0:
            raise FormatError(f"{self.source} must have {name} as a positive integer, not {value!r:.40}")
        return value

    def rope(self, name: str, default: Any) -> Any:
        """Return an entry about rotary positions, which newer versions keep in a dict."""
        inner = self.get("rope_parameters", self.get("rope_scaling", {}))
        found = inner.get(name) if isinstance(inner, Mapping) else None
        return self.get(name, default) if found is None else found


def read_config(data: bytes, source: str) -> tuple[Family, ModelArgs]:
    """Return the family of a model and Megatron's arguments for it.

    Raises ``FormatError`` if Megatron has no such model, or the configuration is not valid.
    """
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{source} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise FormatError(f"{source} must hold a JSON object")
    config = _Config(values, source)
    model_type = str(config.get("model_type", ""))
    name = _SAME.get(model_type, model_type)
    family = next((family for family in FAMILIES if family.name == name), None)
    if family is None:
        known = ", ".join(sorted({*_ARGS_OF, *_SAME}))
        raise FormatError(
            f"{source}: models of the type {model_type!r:.60} cannot be written for Megatron, only {known}"
        )
    args = ModelArgs(_ARGS_OF[name](config), source, ADVICE)
    if not family.fits(args):
        raise FormatError(f"{source}: a model of the type {name} with these settings has no counterpart in Megatron")
    return family, args


def _common_args(config: _Config, *, tied: bool) -> dict[str, Any]:
    return {
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", tied),
        "vocab_size": config.size("vocab_size"),
        "add_position_embedding": True,
        "group_query_attention": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "num_experts": None,
    }


def _modern_args(config: _Config) -> dict[str, Any]:
    """Return the arguments of a model with RMSNorm, rotary positions and a gate."""
    heads = config.size("num_attention_heads")
    groups = config.size("num_key_value_heads", heads)
    hidden = config.size("hidden_size")
    args = {
        **_common_args(config, tied=False),
        "num_layers": config.size("num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": config.size("intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "group_query_attention": groups != heads,
        "kv_channels": config.size("head_dim", max(1, hidden // heads)),
        "max_position_embeddings": config.size("max_position_embeddings", 2048),
        "position_embedding_type": "rope",
        "rotary_base": config.rope("rope_theta", 10000.0),
        "rotary_percent": 1.0,
        "normalization": "RMSNorm",
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "swiglu": True,
        "add_bias_linear": False,
    }
    if config.rope("rope_type", "default") == "llama3":
        args |= {"use_rope_scaling": True, "rope_scaling_factor": config.rope("factor", 8.0)}
    return args


def _qwen2_args(config: _Config) -> dict[str, Any]:
    return {**_modern_args(config), "add_qkv_bias": True}


def _qwen3_args(config: _Config) -> dict[str, Any]:
    return {**_modern_args(config), "qk_layernorm": True}


def _mixtral_args(config: _Config) -> dict[str, Any]:
    return {
        **_modern_args(config),
        "num_experts": config.size("num_local_experts", 8),
        "moe_router_topk": config.size("num_experts_per_tok", 2),
        "moe_ffn_hidden_size": config.size("intermediate_size"),
    }


def _qwen3_moe_args(config: _Config) -> dict[str, Any]:
    return {
        **_qwen3_args(config),
        "num_experts": config.size("num_experts", config.get("num_local_experts", 128)),
        "moe_router_topk": config.size("num_experts_per_tok", 8),
        "moe_ffn_hidden_size": config.size("moe_intermediate_size"),
    }


def _gpt2_args(config: _Config) -> dict[str, Any]:
    hidden, heads = config.size("n_embd"), config.size("n_head")
    return {
        **_common_args(config, tied=True),
        "num_layers": config.size("n_layer"),
        "hidden_size": hidden,
        "ffn_hidden_size": config.size("n_inner", 4 * hidden),
        "num_attention_heads": heads,
        "kv_channels": max(1, hidden // heads),
        "max_position_embeddings": config.size("n_positions"),
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
        "swiglu": False,
        "add_bias_linear": True,
    }


def _gpt_neox_args(config: _Config) -> dict[str, Any]:
    if config.get("use_parallel_residual", True):
        raise FormatError(
            f"{config.source}: Megatron's GPT computes attention and MLP one after the other, and a GPT-NeoX with "
            "use_parallel_residual does not"
        )
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    return {
        **_common_args(config, tied=False),
        "num_layers": config.size("num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": config.size("intermediate_size"),
        "num_attention_heads": heads,
        "kv_channels": max(1, hidden // heads),
        "max_position_embeddings": config.size("max_position_embeddings", 2048),
        "position_embedding_type": "rope",
        "rotary_base": config.rope("rope_theta", config.get("rotary_emb_base", 10000)),
        "rotary_percent": config.rope("partial_rotary_factor", config.get("rotary_pct", 0.25)),
        "normalization": "LayerNorm",
        "norm_epsilon": config.get("layer_norm_eps", 1e-5),
        "swiglu": False,
        "add_bias_linear": True,
    }


_ARGS_OF: Mapping[str, Callable[[_Config], dict[str, Any]]] = {
    "llama": _modern_args,
    "qwen2": _qwen2_args,
    "qwen3": _qwen3_args,
    "mixtral": _mixtral_args,
    "qwen3_moe": _qwen3_moe_args,
    "gpt2": _gpt2_args,
    "gpt_neox": _gpt_neox_args,
}


def missing_config(source: str) -> InvalidArgumentError:
    """Return the error for a source of transformers without a configuration."""
    return InvalidArgumentError(
        f"{source} has no config.json, so the numbers of its heads are unknown: pass config (--config), the path of "
        "the config.json of its model"
    )
