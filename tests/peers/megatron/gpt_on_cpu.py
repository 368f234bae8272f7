"""megatron-core itself on the CPU: GPT models and distributed optimizers, which load checkpoints over gloo.

megatron-core asks for CUDA in a few places. :class:`OnCpu` answers with the CPU; all else is the package's own code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from rankless.megatron.reader.megatron_directory import resolve_iteration


class OnCpu(TorchFunctionMode):
    """Tensors for a GPU are made on the CPU, and those of the CPU say that they are of a GPU."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        result = function(*args, **kwargs)
        if function is Tensor.type and len(args) == 1:
            return result.replace("torch.", "torch.cuda.")
        return result


_SET_STATES = DistributedOptimizer._set_main_param_and_optimizer_states


def _set_states(self: DistributedOptimizer, parameter: Tensor, tensors: dict[str, Tensor]) -> None:
    """Set the states of a parameter.

    Without Transformer Engine and Apex, megatron-core 0.16.1 asks here for the number of steps, which it has set just
    before and which no checkpoint has, its own neither.
    """
    present = self._get_main_param_and_optimizer_states(parameter)
    _SET_STATES(self, parameter, {"step": present["step"], **tensors})


@contextlib.contextmanager
def megatron_ranks(tp_size: int, ep_size: int = 1) -> Iterator[None]:
    """The groups of Megatron over the ranks of this task."""
    with (
        mock.patch.object(torch.cuda, "current_device", return_value=torch.device("cpu")),
        mock.patch.object(type(get_cuda_rng_tracker()), "fork", return_value=contextlib.nullcontext()),
        mock.patch.object(moe_utils, "te_general_gemm", None, create=True),  # 0.16.1 asks for it without having it
        mock.patch.object(DistributedOptimizer, "_set_main_param_and_optimizer_states", _set_states),
        OnCpu(),
    ):
        parallel_state.initialize_model_parallel(tp_size, expert_model_parallel_size=ep_size)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


def read_common(path: Path | str) -> tuple[str, dict[str, Any]]:
    """The folder of the iteration, and what its ranks share."""
    folder = str(resolve_iteration(Path(path)))
    return folder, dist_checkpointing.load_common_state_dict(folder)


def build_gpt(args: Any, *, tp_size: int, ep_size: int = 1) -> GPTModel:
    """The model that the arguments in a checkpoint describe, with random weights."""
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        ffn_hidden_size=args.ffn_hidden_size,
        kv_channels=args.kv_channels,
        normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        gated_linear_unit=args.swiglu,
        activation_func=functional.silu if args.swiglu else functional.gelu,
        add_bias_linear=args.add_bias_linear,
        add_qkv_bias=args.add_qkv_bias,
        qk_layernorm=args.qk_layernorm,
        num_moe_experts=args.num_experts,
        moe_ffn_hidden_size=getattr(args, "moe_ffn_hidden_size", None),
        moe_router_topk=getattr(args, "moe_router_topk", 2),
        moe_router_load_balancing_type="none",
        tensor_model_parallel_size=tp_size,
        expert_model_parallel_size=ep_size,
        params_dtype=args.params_dtype,
        bf16=args.bf16,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        apply_rope_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=args.num_experts, qk_layernorm=args.qk_layernorm, normalization=args.normalization
    )
    if args.num_experts:  # as the layers of Transformer Engine have it, which trainings use
        del spec.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    torch.manual_seed(0)
    model = GPTModel(
        config,
        spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=getattr(args, "rotary_percent", 1.0),
        rotary_base=getattr(args, "rotary_base", 10000),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        parallel_output=False,
    )
    return (model.bfloat16() if args.bf16 else model).eval()


@dataclass(frozen=True)
class Loaded:
    """A model and an optimizer that Megatron has loaded."""

    model: GPTModel
    optimizer: Any
    state: dict[str, Any]


def load_checkpoint(path: str, *, tp_size: int, ep_size: int = 1, with_optimizer: bool = True) -> Loaded:
    """Load a checkpoint, as the training loop of Megatron-LM does."""
    folder, common = read_common(path)
    model = build_gpt(common["args"], tp_size=tp_size, ep_size=ep_size)
    metadata = dict(common["content_metadata"])
    wanted: dict[str, Any] = {"model": model.sharded_state_dict(metadata=metadata)}
    optimizer = None
    if with_optimizer:
        division = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        wrapped = DistributedDataParallel(model.config, division, model)
        settings = OptimizerConfig(
            optimizer="adam",
            lr=0.5,
            clip_grad=0.0,
            use_distributed_optimizer=True,
            bf16=common["args"].bf16,
            params_dtype=common["args"].params_dtype,
        )
        optimizer = get_megatron_optimizer(settings, [wrapped])
        for single in optimizer.chained_optimizers:  # the optimizer of torch, unlike that of Apex, has no states yet
            single._init_optimizer_states_with_dummy_values()
        wanted["optimizer"] = optimizer.sharded_state_dict(wanted, is_loading=True, metadata=metadata)
    state = dist_checkpointing.load(wanted, folder)
    model.load_state_dict(state["model"])
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
        for single in optimizer.chained_optimizers:
            for own in single.optimizer.state.values():  # 0.16.1 gives all parameters one tensor, which each counts up
                own["step"] = own["step"].clone()
    return Loaded(model, optimizer, state)


def compute_logits(model: GPTModel, tokens: Tensor) -> Tensor:
    """What the model says about tokens."""
    length = tokens.shape[1]
    mask = torch.ones(length, length).triu(1).bool()[None, None]
    with torch.no_grad():
        logits: Tensor = model(tokens, torch.arange(length)[None], mask)
    return logits


def own_part(parameter: Tensor, whole: Tensor, *, is_gated: bool) -> Tensor:
    """The part of a whole tensor that this rank has. The gate and the projection are divided one by one."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    halves = whole.chunk(2) if is_gated else (whole,)
    return torch.cat([half.chunk(size, parameter.partition_dim)[rank] for half in halves], 0)


def optimizer_states(loaded: Loaded) -> dict[str, dict[str, Tensor]]:
    """The states of each parameter of this rank, flat, as far as this data-parallel rank has them."""
    names = {id(parameter): name for name, parameter in loaded.model.named_parameters()}
    states: dict[str, dict[str, Tensor]] = {}
    for optimizer in loaded.optimizer.chained_optimizers:
        for parameter in optimizer.model_param_group_index_map:
            own = optimizer._get_main_param_and_optimizer_states(parameter)
            place = optimizer._get_model_param_range_map(parameter)["param"]
            states[names[id(parameter)]] = {**own, "range": torch.tensor([place.start, place.end])}
    return states


def world_size() -> int:
    """The number of ranks of this task."""
    return dist.get_world_size()
