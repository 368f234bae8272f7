"""The model families of Hugging Face that Megatron trains, and how the arguments of a training tell them apart.

The reader asks it for ``layout="hf"``, and a conversion to Megatron for the reverse, on each rank. A model with an
argument that changes the meaning of tensors must be refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rankless.errors import FormatError
from rankless.megatron.reader.model_args import ModelArgs

#: Arguments that change the meaning of tensors in ways that no family here has.
_FOREIGN = (
    *("apply_layernorm_1p", "apply_residual_connection_post_layernorm", "multi_latent_attention", "mtp_num_layers"),
    *("rotary_interleaved", "squared_relu", "quick_geglu", "attention_output_gate", "hybrid_override_pattern"),
    *("moe_shared_expert_intermediate_size", "is_hybrid_model", "num_experts_interleaved", "sandwich_norm"),
    "activation_func",
)


@dataclass(frozen=True)
class Traits:
    """The traits of a model that tell families apart."""

    norm: str = "RMSNorm"
    position: str = "rope"
    has_gate: bool = True
    has_bias: bool = False
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    has_experts: bool = False

    @classmethod
    def from_args(cls, args: ModelArgs) -> Traits:
        """Return the traits of a model."""
        has_bias = args.is_set("add_bias_linear")
        return cls(
            str(args.get("normalization", "LayerNorm")),
            str(args.get("position_embedding_type", "learned_absolute")),
            args.is_set("swiglu"),
            has_bias,
            has_bias or args.is_set("add_qkv_bias"),
            args.is_set("qk_layernorm"),
            bool(args.get("num_experts")),
        )

    def describe(self) -> str:
        """Return the arguments that say this, for messages."""
        return (
            f"normalization {self.norm}, position_embedding_type {self.position}, swiglu {self.has_gate}, "
            f"add_bias_linear {self.has_bias}, add_qkv_bias {self.has_qkv_bias}, qk_layernorm {self.has_qk_norm}, "
            f"num_experts {self.has_experts}"
        )


@dataclass(frozen=True)
class Family:
    """A family of models: its traits, and the names of its tensors.

    Attributes:
        name: The model type of transformers.
        traits: The traits that the arguments must have.
        ends: The names of the tensors outside of the layers, by Megatron's name.
        prefix: The beginning of the names in a layer, with ``{}`` for its number.
        inner: The names in a layer, by Megatron's name. Several names are the parts of a tensor, in order.
        experts: The names of the gate, the projection and the output of an expert, with ``{}`` for its number.
        has_groups: Whether queries may share keys and values.
        is_transposed: Whether matrices in layers have inputs as rows, and queries, keys and values are three blocks.
        may_rotate_less: Whether positions may rotate a part of a head only.
    """

    name: str
    traits: Traits
    ends: Mapping[str, str]
    prefix: str
    inner: Mapping[str, tuple[str, ...]]
    experts: tuple[str, str, str] | None = None
    has_groups: bool = True
    is_transposed: bool = False
    may_rotate_less: bool = False

    def fits(self, args: ModelArgs) -> bool:
        """Return whether a model with these arguments belongs to the family."""
        rotates_less = self.traits.position == "rope" and args.get("rotary_percent", 1.0) != 1.0
        return (
            Traits.from_args(args) == self.traits
            and (self.has_groups or not args.is_set("group_query_attention"))
            and (self.may_rotate_less or not rotates_less)
        )


_QKV = "self_attention.linear_qkv"
_LLAMA_ENDS = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_ATTENTION = {
    f"{_QKV}.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    f"{_QKV}.layer_norm_weight": ("input_layernorm.weight",),
    "input_layernorm.weight": ("input_layernorm.weight",),
}
_QKV_BIAS = {f"{_QKV}.bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")}
_QK_NORM = {
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
}
_MLP = {
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
}
_MOE_NORM = {"pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",)}


def _both(table: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the names of weights and biases."""
    return {f"{source}{kind}": (f"{target}{kind}",) for source, target in table.items() for kind in ("weight", "bias")}


def _ends_of(embedding: str, norm: str, output: str) -> dict[str, str]:
    norms = {f"decoder.final_layernorm.{kind}": f"{norm}.{kind}" for kind in ("weight", "bias")}
    return {"embedding.word_embeddings.weight": embedding, **norms, "output_layer.weight": output}


def _gpt_layer(norms: tuple[str, str], attention: tuple[str, str], mlp: tuple[str, str]) -> dict[str, tuple[str, ...]]:
    return _both(
        {
            f"{_QKV}.layer_norm_": f"{norms[0]}.",
            f"{_QKV}.": f"{attention[0]}.",
            "self_attention.linear_proj.": f"{attention[1]}.",
            "mlp.linear_fc1.layer_norm_": f"{norms[1]}.",
            "mlp.linear_fc1.": f"{mlp[0]}.",
            "mlp.linear_fc2.": f"{mlp[1]}.",
        }
    )


_LAYER = "model.layers.{}."
_QWEN_EXPERTS = ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight", "mlp.experts.{}.down_proj.weight")
_MIXTRAL_EXPERTS = tuple(f"block_sparse_moe.experts.{{}}.{name}.weight" for name in ("w1", "w3", "w2"))

FAMILIES = (
    Family("llama", Traits(), _LLAMA_ENDS, _LAYER, {**_ATTENTION, **_MLP}),
    Family("qwen2", Traits(has_qkv_bias=True), _LLAMA_ENDS, _LAYER, {**_ATTENTION, **_QKV_BIAS, **_MLP}),
    Family("qwen3", Traits(has_qk_norm=True), _LLAMA_ENDS, _LAYER, {**_ATTENTION, **_QK_NORM, **_MLP}),
    Family(
        "mixtral",
        Traits(has_experts=True),
        _LLAMA_ENDS,
        _LAYER,
        {**_ATTENTION, **_MOE_NORM, "mlp.router.weight": ("block_sparse_moe.gate.weight",)},
        (_MIXTRAL_EXPERTS[0], _MIXTRAL_EXPERTS[1], _MIXTRAL_EXPERTS[2]),
    ),
    Family(
        "qwen3_moe",
        Traits(has_experts=True, has_qk_norm=True),
        _LLAMA_ENDS,
        _LAYER,
        {**_ATTENTION, **_QK_NORM, **_MOE_NORM, "mlp.router.weight": ("mlp.gate.weight",)},
        _QWEN_EXPERTS,
    ),
    Family(
        "gpt2",
        Traits("LayerNorm", "learned_absolute", has_gate=False, has_bias=True, has_qkv_bias=True),
        {
            **_ends_of("transformer.wte.weight", "transformer.ln_f", "lm_head.weight"),
            "embedding.position_embeddings.weight": "transformer.wpe.weight",
        },
        "transformer.h.{}.",
        _gpt_layer(("ln_1", "ln_2"), ("attn.c_attn", "attn.c_proj"), ("mlp.c_fc", "mlp.c_proj")),
        has_groups=False,
        is_transposed=True,
    ),
    Family(
        "gpt_neox",
        Traits("LayerNorm", has_gate=False, has_bias=True, has_qkv_bias=True),
        _ends_of("gpt_neox.embed_in.weight", "gpt_neox.final_layer_norm", "embed_out.weight"),
        "gpt_neox.layers.{}.",
        _gpt_layer(
            ("input_layernorm", "post_attention_layernorm"),
            ("attention.query_key_value", "attention.dense"),
            ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        ),
        has_groups=False,
        may_rotate_less=True,
    ),
)


def choose_family(args: ModelArgs) -> Family:
    """Return the family that a model belongs to. Raises ``FormatError``, naming its traits, if it is none of these."""
    if not args.values:
        raise FormatError(args.problem or f"{args.source} has no args, so its model family is unknown: {args.advice}")
    foreign = [name for name in _FOREIGN if args.is_set(name)]
    family = next((family for family in FAMILIES if not foreign and family.fits(args)), None)
    if family is None:
        reason = f"{', '.join(foreign)} is set" if foreign else Traits.from_args(args).describe()
        grouped = ", with grouped queries" if args.is_set("group_query_attention") else ""
        raise FormatError(
            f"{args.source}: a model with these args ({reason}{grouped}) is none of "
            f"{', '.join(family.name for family in FAMILIES)}: {args.advice}"
        )
    return family
