"""The values of a checkpoint of Megatron: values that all ranks share, and the objects of single ranks.

:class:`~rankless.megatron.writer.megatron_target.MegatronTarget` calls it on every rank when it is made. The keys are
Megatron's.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rankless.megatron.reader.group_settings import EXPERT
from rankless.megatron.reader.transformers_layout import EMBEDDING
from rankless.megatron.writer.megatron_source import MegatronSource
from rankless.megatron.writer.parts import OPTIMIZER
from rankless.state.tensor_views import DTYPES

#: The form of the optimizer's states: each like its parameter, for any layout of ranks.
_FORM = "fully_reshardable"

#: The settings that the keys of the tensors depend on. Megatron reads it before it asks for tensors.
_CONTENT = {
    "distrib_optim_sharding_type": _FORM,
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}

#: The values of a source that have no place in Megatron are under this key.
_OTHERS = "other_values"

#: An argument that every training of Megatron has, and the arguments that a training elsewhere gets.
_PARALLEL = "tensor_model_parallel_size"
_DEFAULTS = {
    _PARALLEL: 1,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "no_save_rng": True,
    "consumed_train_samples": 0,
    "make_vocab_size_divisible_by": 1,
}

#: The part of an object's key that says which of the ranks has it: its place, and the number of places. The reader
#: has no numbers of places for the format ``torch``.
_SHARD = re.compile(r"(\d{1,6}(?:\.\d{1,6})*)(?:_(\d{1,6}(?:\.\d{1,6})*))?")


def build_common(source: MegatronSource, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that all ranks share: arguments, iteration, optimizer groups and settings of the schedule."""
    content = values.get("user_content")
    megatron = content if isinstance(content, Mapping) and "args" in content else {}
    own = {key: value for key, value in megatron.items() if not _is_sharded(value)}
    iteration = source.plan.iteration or 0
    common: dict[str, Any] = {
        "checkpoint_version": 3.0,
        "num_floating_point_operations_so_far": 0,
        **own,
        "iteration": iteration,
        "content_metadata": {
            **_CONTENT,
            **({} if source.plan.model.is_homogeneous else {"non_homogeneous_layers": True}),
        },
        "args": _build_args(source, iteration),
    }
    scaler = common.pop("grad_scaler", None)
    if source.plan.groups is not None:
        common["optimizer"] = _build_optimizer(source.plan.groups, scaler)
        common.setdefault("opt_param_scheduler", _build_schedule(source))
    others = {key: value for key, value in values.items() if key not in {"optimizer", "user_content"} and value}
    if content is not None and not megatron:
        others["user_content"] = content
    return {**common, **({_OTHERS: others} if others else {})}


def list_objects(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the objects of single ranks, such as their random states, by key and shard."""
    content = values.get("user_content")
    items = content.items() if isinstance(content, Mapping) and "args" in content else ()
    return {
        f"{key}/shard_{shard}": value
        for key, by_shard in items
        if _is_sharded(by_shard)
        for shard, value in zip(_name_shards(list(by_shard)), by_shard.values(), strict=True)
    }


def _name_shards(shards: Sequence[str]) -> list[str]:
    """Return the names of shards, all with the numbers of places.

    For example, ``0`` and ``1`` become ``0_2`` and ``1_2``.
    """
    if all("_" in shard for shard in shards):
        return list(shards)
    places = [[int(number) for number in shard.partition("_")[0].split(".")] for shard in shards]
    sizes = ".".join(str(max(column) + 1) for column in zip(*places, strict=False))
    return [f"{shard.partition('_')[0]}_{sizes}" for shard in shards]


def _is_sharded(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(key, str) and _SHARD.fullmatch(key) for key in value)
    )


def _build_args(source: MegatronSource, iteration: int) -> Namespace:
    """Return the arguments of the training; of a training elsewhere, those that Megatron needs to go on."""
    plan, options = source.plan, source.plan.options
    entry = plan.entries.get(EMBEDDING)
    dtype = DTYPES[next(iter(plan.entries.values())).info.dtype]
    own = {
        "iteration": iteration,
        "ckpt_format": "torch_dist",
        "no_save_optim": plan.groups is None,
        "use_distributed_optimizer": True,
        "dist_ckpt_optim_fully_reshardable": True,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
    }
    if entry is not None:
        own["padded_vocab_size"] = entry.info.shape[0]
    if options.vocab_divisible_by > 1:
        own["make_vocab_size_divisible_by"] = options.vocab_divisible_by
    if options.consumed_samples is not None:
        own["consumed_train_samples"] = options.consumed_samples
    is_own_training = _PARALLEL in plan.args.values
    return Namespace(**{**({} if is_own_training else _DEFAULTS), **plan.args.values, **own})


def _build_optimizer(groups: Any, scaler: Any) -> dict[Any, Any]:
    """Return the optimizer's settings. Experts that ranks divide have an optimizer of their own."""
    extra = {} if scaler is None else {"grad_scaler": scaler}
    kinds = sorted({bool(group.get(EXPERT, False)) for group in groups})
    trees = [
        {
            OPTIMIZER: {"param_groups": [dict(group) for group in groups if bool(group.get(EXPERT, False)) == kind]},
            "param_state_sharding_type": _FORM,
            **extra,
        }
        for kind in kinds
    ]
    return trees[0] if len(trees) == 1 else dict(enumerate(trees))


def _build_schedule(source: MegatronSource) -> dict[str, Any]:
    """Return a schedule that keeps the learning rate. Megatron's own goes on from the number of samples in it."""
    groups = source.plan.groups or [{}]
    samples = source.plan.options.consumed_samples or 0
    return {
        "max_lr": groups[0].get("lr", 0.0),
        "min_lr": 0.0,
        "lr_warmup_steps": 0,
        "lr_decay_steps": max(samples, 1),
        "lr_decay_style": "constant",
        "num_steps": samples,
    }
