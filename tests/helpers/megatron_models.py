"""Small models in Megatron's layout: random tensors, a forward pass on them, and checkpoints with them.

The forward pass is written from megatron-core's ``attention.py``, ``mlp.py`` and ``router.py``, and uses Megatron's
tensors as they are. It is the oracle for models of transformers that are loaded with the same tensors.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional

LAYERS, HIDDEN, HEADS, GROUPS, DIM, FFN, VOCAB, PADDED, POSITIONS, EXPERTS = 3, 32, 4, 2, 8, 48, 60, 64, 24, 4

_BASE = {
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_query_groups": GROUPS,
    "kv_channels": DIM,
    "ffn_hidden_size": FFN,
    "vocab_size": VOCAB,
    "padded_vocab_size": PADDED,
    "iteration": 7,
}
_MODERN = {
    **_BASE,
    "group_query_attention": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
_CLASSIC = {**_BASE, "group_query_attention": False, "normalization": "LayerNorm", "swiglu": False}
_MOE = {**_MODERN, "num_experts": EXPERTS, "moe_router_topk": 2, "moe_ffn_hidden_size": FFN}

#: The arguments of a training of each family.
ARGS: Mapping[str, dict[str, Any]] = {
    "llama": _MODERN,
    "qwen2": {**_MODERN, "add_qkv_bias": True, "untie_embeddings_and_output_weights": False},
    "qwen3": {**_MODERN, "qk_layernorm": True},
    "mixtral": _MOE,
    "qwen3_moe": {**_MOE, "qk_layernorm": True},
    "gpt2": {
        **_CLASSIC,
        "position_embedding_type": "learned_absolute",
        "add_bias_linear": True,
        "untie_embeddings_and_output_weights": False,
    },
    "gpt_neox": {
        **_CLASSIC,
        "position_embedding_type": "rope",
        "add_bias_linear": True,
        "rotary_percent": 0.5,
        "untie_embeddings_and_output_weights": True,
    },
}


#: Tensors by state and name.
States = Mapping[str, Mapping[str, Tensor]]

_SETTINGS = {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "lr_mult": 1.0, "step": 5.0}

#: The settings of an optimizer's groups.
GROUP_SETTINGS = [
    {**_SETTINGS, "wd_mult": 1.0, "weight_decay": 0.1},
    {**_SETTINGS, "wd_mult": 0.0, "weight_decay": 0.0},
]


def build_tensors(args: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random tensors with Megatron's names, each layer by itself."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: float(name.endswith(("norm.weight", "norm_weight"))) + 0.2 * torch.randn(shape, generator=generator)
        for name, shape in _list_shapes(args)
    }


def _list_shapes(args: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "embedding.word_embeddings.weight", (PADDED, HIDDEN)
    if args["position_embedding_type"] == "learned_absolute":
        yield "embedding.position_embeddings.weight", (POSITIONS, HIDDEN)
    for layer in range(LAYERS):
        for inner, shape in (*_list_attention(args), *(_list_experts if args.get("num_experts") else _list_mlp)(args)):
            yield f"decoder.layers.{layer}.{inner}", shape
    yield from _list_norm("decoder.final_layernorm.", args)
    if args["untie_embeddings_and_output_weights"]:
        yield "output_layer.weight", (PADDED, HIDDEN)


def _list_norm(prefix: str, args: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for kind in ("weight", "bias") if args["normalization"] == "LayerNorm" else ("weight",):
        yield f"{prefix}{kind}", (HIDDEN,)


def _list_attention(args: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    rows = (HEADS + 2 * (GROUPS if args["group_query_attention"] else HEADS)) * DIM
    yield from _list_norm("self_attention.linear_qkv.layer_norm_", args)
    yield "self_attention.linear_proj.weight", (HIDDEN, HEADS * DIM)
    if args["add_bias_linear"]:
        yield "self_attention.linear_proj.bias", (HIDDEN,)
    yield "self_attention.linear_qkv.weight", (rows, HIDDEN)
    if args["add_bias_linear"] or args.get("add_qkv_bias"):
        yield "self_attention.linear_qkv.bias", (rows,)
    if args.get("qk_layernorm"):
        yield "self_attention.q_layernorm.weight", (DIM,)
        yield "self_attention.k_layernorm.weight", (DIM,)


def _list_mlp(args: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    width = FFN * (2 if args["swiglu"] else 1)
    yield from _list_norm("mlp.linear_fc1.layer_norm_", args)
    yield "mlp.linear_fc1.weight", (width, HIDDEN)
    if args["add_bias_linear"]:
        yield "mlp.linear_fc1.bias", (width,)
    yield "mlp.linear_fc2.weight", (HIDDEN, FFN)
    if args["add_bias_linear"]:
        yield "mlp.linear_fc2.bias", (HIDDEN,)


def _list_experts(args: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from _list_norm("pre_mlp_layernorm.", args)
    yield "mlp.router.weight", (EXPERTS, HIDDEN)
    for expert in range(EXPERTS):
        yield f"mlp.experts.local_experts.{expert}.linear_fc1.weight", (2 * FFN, HIDDEN)
        yield f"mlp.experts.local_experts.{expert}.linear_fc2.weight", (HIDDEN, FFN)


def stack_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as Megatron stores them: the first dimension counts layers, and the next one experts."""
    stacked: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("decoder.layers."):
            inner = name.split(".", 3)[3]
            if ".local_experts." in inner:
                before, _, after = inner.partition(".local_experts.")
                inner = f"{before}.experts.{after.partition('.')[2]}"
            stacked.setdefault(f"decoder.layers.{inner}", []).append(tensor)
        else:
            stacked[name] = [tensor]
    shapes = {name: (LAYERS, EXPERTS) if ".experts." in name else (LAYERS,) for name in stacked}
    return {
        name: torch.stack(rows).unflatten(0, shapes[name]) if name.startswith("decoder.layers.") else rows[0]
        for name, rows in stacked.items()
    }


def save_torch_dist(
    folder: Path, tensors: Mapping[str, Tensor], args: Mapping[str, Any], states: States = MappingProxyType({})
) -> Path:
    """Save an iteration of ``torch_dist``: a fully reshardable optimizer if there are states."""
    entries: dict[str, Any] = dict(stack_tensors(tensors))
    for state, by_name in states.items():
        entries |= {f"optimizer.state.{state}.{name}": tensor for name, tensor in stack_tensors(by_name).items()}
    optimizer = {"param_state_sharding_type": "fully_reshardable", "optimizer": {"param_groups": GROUP_SETTINGS}}
    return save_entries(folder, entries, args, optimizer if states else None)


def save_flat(
    folder: Path,
    weights: Mapping[str, Tensor],
    args: Mapping[str, Any],
    states: States,
    model: Mapping[str, Tensor] | None = None,
) -> Path:
    """Save an iteration with ``dp_zero_gather_scatter``: flat tensors, in the reverse order of the weights.

    ``model`` has all weights, if some are not trained.
    """
    starts, end = {}, 0
    for name in reversed(weights):
        starts[name] = -(-end // 64) * 64
        end = starts[name] + weights[name].numel()
    flat = {state: torch.randn(end, generator=torch.Generator().manual_seed(4)) for state in states}
    for state, tensors in states.items():
        for name, start in starts.items():
            flat[state][start : start + tensors[name].numel()] = tensors[name].flatten()
    key = "optimizer.distributed.dp_group_idx_0"
    entries: dict[str, Any] = dict(stack_tensors(weights if model is None else model))
    dtypes = next(iter(weights.values())).dtype, torch.float32
    entries[f"{key}.param_state/shard_0_1"] = [
        {0: {dtypes: {**flat, "numel_unpadded": end}}, "buckets_coalesced": True}
    ]
    entries[f"{key}.optimizer/shard_0_1"] = [{"param_groups": GROUP_SETTINGS}]
    return save_entries(folder, entries, args, {"param_state_sharding_type": "dp_zero_gather_scatter"})


def save_sharded(folder: str, family: str) -> None:
    """Save the weights of a family from tensor-parallel ranks: each has columns or rows of the matrices."""
    entries: dict[str, Any] = {}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name, stacked in stack_tensors(build_tensors(ARGS[family])).items():
        dim = next((dim for end, dim in _DIVIDED.items() if name.endswith(end)), None)
        placement = Replicate() if dim is None or stacked.ndim <= dim else Shard(dim)
        entries[name] = distribute_tensor(stacked, mesh, [placement])
    objects = {"common_state/shard_0_1": [{"args": Namespace(**ARGS[family]), "iteration": 7}]}
    entries |= dict.fromkeys(objects, "")
    dcp.save(entries, checkpoint_id=folder, planner=_ObjectPlanner(objects))
    (Path(folder) / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))


#: The dimension of stacked tensors that tensor-parallel ranks divide.
_DIVIDED = {
    "linear_qkv.weight": 1,
    "linear_qkv.bias": 1,
    "linear_fc1.weight": 1,
    "linear_fc1.bias": 1,
    "linear_proj.weight": 2,
    "linear_fc2.weight": 2,
    "word_embeddings.weight": 0,
    "output_layer.weight": 0,
}


class _ObjectPlanner(DefaultSavePlanner):
    """A planner that saves objects as they are. That of torch makes the keys of their dicts strings."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        super().__init__(flatten_state_dict=False)
        self._objects = objects

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._objects[index.fqn] if index.fqn in self._objects else super().lookup_object(index)


def save_entries(folder: Path, entries: Mapping[str, Any], args: Mapping[str, Any], optimizer: Any = None) -> Path:
    """Save an iteration of ``torch_dist`` with these entries, and the values that all ranks share."""
    common: dict[str, Any] = {"args": Namespace(**args), "iteration": args["iteration"], "checkpoint_version": 3.0}
    if optimizer is not None:
        common["optimizer"] = optimizer
    entries = {**entries, "common_state/shard_0_1": [common]}
    folder.mkdir(parents=True)
    objects = {name: value for name, value in entries.items() if not isinstance(value, Tensor)}
    entries = {name: name if name in objects else value for name, value in entries.items()}
    dcp.save(entries, checkpoint_id=folder, planner=_ObjectPlanner(objects), no_dist=True)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    return folder


def run_model(tensors: Mapping[str, Tensor], args: Mapping[str, Any], tokens: Tensor) -> Tensor:
    """The logits of a batch of tokens."""
    hidden = tensors["embedding.word_embeddings.weight"][tokens]
    if args["position_embedding_type"] == "learned_absolute":
        hidden = hidden + tensors["embedding.position_embeddings.weight"][: tokens.shape[1]]
    for layer in range(LAYERS):
        prefix = f"decoder.layers.{layer}."
        inner = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        hidden = hidden + _attend(inner, args, _norm(hidden, inner, "self_attention.linear_qkv.layer_norm_", args))
        if args.get("num_experts"):
            hidden = hidden + _mix_experts(inner, args, _norm(hidden, inner, "pre_mlp_layernorm.", args))
        else:
            hidden = hidden + _run_mlp(inner, args, _norm(hidden, inner, "mlp.linear_fc1.layer_norm_", args), "mlp.")
    hidden = _norm(hidden, tensors, "decoder.final_layernorm.", args)
    output = tensors.get("output_layer.weight", tensors["embedding.word_embeddings.weight"])
    return (hidden @ output.T)[..., :VOCAB]


def _norm(hidden: Tensor, tensors: Mapping[str, Tensor], prefix: str, args: Mapping[str, Any]) -> Tensor:
    weight = tensors[f"{prefix}weight"]
    if args["normalization"] == "RMSNorm":
        return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-5) * weight
    return functional.layer_norm(hidden, weight.shape, weight, tensors[f"{prefix}bias"], 1e-5)


def _attend(inner: Mapping[str, Tensor], args: Mapping[str, Any], hidden: Tensor) -> Tensor:
    batch, length, _ = hidden.shape
    groups = GROUPS if args["group_query_attention"] else HEADS
    mixed = functional.linear(
        hidden, inner["self_attention.linear_qkv.weight"], inner.get("self_attention.linear_qkv.bias")
    )
    mixed = mixed.view(batch, length, groups, (HEADS // groups + 2) * DIM)
    query, key, value = mixed.split([HEADS // groups * DIM, DIM, DIM], dim=3)
    query = query.reshape(batch, length, HEADS, DIM)
    if args.get("qk_layernorm"):
        query = _norm(query, inner, "self_attention.q_layernorm.", args)
        key = _norm(key, inner, "self_attention.k_layernorm.", args)
    if args["position_embedding_type"] == "rope":
        query, key = (_rotate(heads, int(DIM * args.get("rotary_percent", 1.0))) for heads in (query, key))
    key, value = (heads.repeat_interleave(HEADS // groups, dim=2) for heads in (key, value))
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / DIM**0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    context = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), value).reshape(batch, length, HEADS * DIM)
    return functional.linear(
        context, inner["self_attention.linear_proj.weight"], inner.get("self_attention.linear_proj.bias")
    )


def _rotate(heads: Tensor, size: int) -> Tensor:
    turned, passed = heads[..., :size], heads[..., size:]
    frequencies = 1.0 / 10000 ** (torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(heads.shape[1]).float(), frequencies)
    angles = torch.cat([angles, angles], -1)[None, :, None, :]
    first, second = turned.chunk(2, -1)
    turned = turned * angles.cos() + torch.cat([-second, first], -1) * angles.sin()
    return torch.cat([turned, passed], -1)


def _run_mlp(inner: Mapping[str, Tensor], args: Mapping[str, Any], hidden: Tensor, prefix: str) -> Tensor:
    inside = functional.linear(hidden, inner[f"{prefix}linear_fc1.weight"], inner.get(f"{prefix}linear_fc1.bias"))
    if args["swiglu"]:
        gate, projection = inside.chunk(2, -1)
        inside = functional.silu(gate) * projection
    else:
        inside = functional.gelu(inside)
    return functional.linear(inside, inner[f"{prefix}linear_fc2.weight"], inner.get(f"{prefix}linear_fc2.bias"))


def _mix_experts(inner: Mapping[str, Tensor], args: Mapping[str, Any], hidden: Tensor) -> Tensor:
    scores, chosen = (hidden @ inner["mlp.router.weight"].T).topk(args["moe_router_topk"], dim=-1)
    shares = scores.softmax(-1)
    outputs = torch.stack(
        [_run_mlp(inner, args, hidden, f"mlp.experts.local_experts.{expert}.") for expert in range(EXPERTS)], dim=-2
    )
    picked = outputs.gather(-2, chosen[..., None].expand(*chosen.shape, HIDDEN))
    return (picked * shares[..., None]).sum(-2)
