"""Sharding specs of the models that NxD's examples train: Llama, Mixtral, GPT-NeoX.

Source: ``examples/training`` and ``scripts/checkpoint_converter.py`` of NxD 0.18.

The reader and the writer of NxD's format load specs with it, on each rank that needs one. The rules must match the
models in NxD's examples: a wrong rule would mix up rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from rankless.errors import InvalidArgumentError
from rankless.nxd.reader.sharding_spec import ShardingRule, ShardingSpec, parse_spec
from rankless.storage.posix import path_exists, read_small

_ASK = (
    "it does not say whether keys and values are repeated: pass layout='{}:kv_size_multiplier=1', or the model's "
    "kv_size_multiplier and number of key and value heads: kv_size_multiplier=4,kv_heads=8"
)
_ASK_FUSED = (
    "it does not say how many heads it has: pass layout='{}:kv_size_multiplier=1,heads=32,kv_heads=8', with the "
    "model's numbers"
)


def _attention_rules(family: str, options: Mapping[str, int]) -> tuple[ShardingRule, ...]:
    """Return the rules of attention layers of the Llama family."""
    copies = options.get("kv_size_multiplier", 1)
    has_copies = options.keys() >= {"kv_size_multiplier"} and (copies == 1 or "kv_heads" in options)
    ask = "" if has_copies else _ASK.format(family)
    heads = options.get("kv_heads", 0)
    has_heads = {"heads", "kv_heads", "kv_size_multiplier"} <= options.keys()
    shares = (options["heads"], options["kv_heads"] * copies, options["kv_heads"] * copies) if has_heads else ()
    projections = ("*.q_proj.weight", "*.k_proj.weight", "*.v_proj.weight")
    return (
        ShardingRule("*.qkv_proj.weight_q", 0, projections[:1], ordered_for=(copies,), kv_heads=heads, asks=ask),
        *(
            ShardingRule(f"*.qkv_proj.weight_{kind}", 0, (f"*.{kind}_proj.weight",), copies=(copies,), asks=ask)
            for kind in "kv"
        ),
        *(ShardingRule(name, 0) for name in projections),
        ShardingRule(
            "*.qkv_proj.weight_qkv",
            0,
            projections,
            shares=shares,
            copies=(1, copies, copies),
            ordered_for=(copies, 1, 1),
            kv_heads=heads,
            asks="" if has_heads else _ASK_FUSED.format(family),
        ),
        ShardingRule("*.qkv_proj.weight", 0, projections),
        ShardingRule("*.o_proj.weight", 1, ordered_for=(copies,), kv_heads=heads, asks=ask if copies > 1 else ""),
    )


_ENDS = (ShardingRule("*embed_tokens.weight", 0), ShardingRule("*lm_head.weight", 0))
_NORMS = (ShardingRule("*layernorm.weight"), ShardingRule("*norm.weight"), ShardingRule("*inv_freq"))
_LLAMA_MLP = (
    ShardingRule("*.gate_up_proj.weight", 0, ("*.gate_proj.weight", "*.up_proj.weight")),
    ShardingRule("*.gate_proj.weight", 0),
    ShardingRule("*.up_proj.weight", 0),
    ShardingRule("*.down_proj.weight", 1),
)
_MOE = "*.block_sparse_moe"
_MIXTRAL_MLP = (
    ShardingRule("*.mlp.router.linear_router.weight", None, (f"{_MOE}.gate.weight",)),
    ShardingRule(
        "*.mlp.expert_mlps.mlp_op.gate_up_proj.weight",
        2,
        (f"{_MOE}.experts.{{}}.w1.weight", f"{_MOE}.experts.{{}}.w3.weight"),
        experts=True,
        transposed=True,
    ),
    ShardingRule(
        "*.mlp.expert_mlps.mlp_op.down_proj.weight",
        1,
        (f"{_MOE}.experts.{{}}.w2.weight",),
        experts=True,
        transposed=True,
    ),
)


def _llama_spec(options: Mapping[str, int]) -> ShardingSpec:
    rules = (*_attention_rules("llama", options), *_LLAMA_MLP, *_ENDS, *_NORMS)
    return ShardingSpec(rules, ("*inv_freq",), layer="*layers.{}.*", first=("*embed_tokens.weight",))


def _mixtral_spec(options: Mapping[str, int]) -> ShardingSpec:
    rules = (*_attention_rules("mixtral", options), *_MIXTRAL_MLP, *_ENDS, *_NORMS)
    return ShardingSpec(rules, ("*inv_freq",), layer="*layers.{}.*", first=("*embed_tokens.weight",))


def _gpt_neox_spec(options: Mapping[str, int]) -> ShardingSpec:
    del options
    sharded = (
        ("embed_in.weight", 0),
        ("embed_out.weight", 0),
        ("query_key_value.weight", 0),
        ("query_key_value.bias", 0),
    )
    mlp = (
        ("dense_h_to_4h.weight", 0),
        ("dense_h_to_4h.bias", 0),
        ("dense_4h_to_h.weight", 1),
        ("attention.dense.weight", 1),
    )
    whole = ("dense_4h_to_h.bias", "attention.dense.bias", "layernorm.weight", "layernorm.bias", "layer_norm.weight")
    buffers = ("*.attention.bias", "*.masked_bias", "*inv_freq")
    rules = (
        *(ShardingRule(f"*{name}", dim) for name, dim in (*sharded, *mlp)),
        *(ShardingRule(f"*{name}") for name in (*whole, "layer_norm.bias")),
        *map(ShardingRule, buffers),
    )
    return ShardingSpec(rules, buffers, layer="*layers.{}.*", first=("*embed_in.weight",))


#: Functions that build the named layouts from their options, such as ``llama:kv_size_multiplier=4``.
BUILT_IN: Mapping[str, Callable[[Mapping[str, int]], ShardingSpec]] = {
    "gpt-neox": _gpt_neox_spec,
    "llama": _llama_spec,
    "mixtral": _mixtral_spec,
}

_OPTIONS = ("kv_size_multiplier", "heads", "kv_heads")


def load_spec(text: str) -> ShardingSpec:
    """Load a spec from its name, the path of a spec file, or JSON text. Raises ``InvalidArgumentError``."""
    if text.lstrip().startswith("{"):
        return parse_spec(text, "the layout")
    name, _, options = text.partition(":")
    if name in BUILT_IN:
        return BUILT_IN[name](dict(_parse_option(option, text) for option in options.split(",") if option))
    if not path_exists(Path(text)):
        raise InvalidArgumentError(
            f"layout {text!r} is neither one of {', '.join(BUILT_IN)} nor the path of a spec file"
        )
    return parse_spec(read_small(Path(text)).decode(errors="replace"), text)


def _parse_option(option: str, text: str) -> tuple[str, int]:
    """Parse an option of a named layout. For example, ``kv_heads=8``."""
    key, _, value = option.partition("=")
    if key not in _OPTIONS or not value.isdecimal() or int(value) < 1:
        raise InvalidArgumentError(
            f"layout {text!r}: options must be {', '.join(_OPTIONS)} with a number; got {option!r}"
        )
    return key, int(value)
