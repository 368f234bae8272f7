"""The layout of a model, from what its layers have noted on its parameters, as those of NxD and Megatron do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from torch import nn

from holdfast.compat.nxd.format.sharding_spec import ShardingRule, ShardingSpec

#: What such a layer sets on a parameter that ranks divide.
_DIVIDED, _DIM, _STRIDE = "tensor_model_parallel", "partition_dim", "partition_stride"


def sharding_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
    """The text of a spec file: how tensor-parallel ranks divide the model, and what the optimizer has in which group.

    Call it where the model is that the checkpoint is of, on one rank of each stage of a pipeline, and keep the text:
    NxD's checkpoints do not say any of it. A parameter whose layer noted nothing is taken to be whole on every rank.
    """
    parameters = dict(model.named_parameters())
    rules = [
        *(_rule(name, one) for name, one in parameters.items()),
        *(ShardingRule(name) for name, _ in model.named_buffers()),
    ]
    spec = ShardingSpec(tuple(rules), tuple(_not_trained(model, optimizer)), tuple(_groups(parameters, optimizer)))
    return msgspec.json.encode(spec).decode()


def _rule(name: str, parameter: nn.Parameter) -> ShardingRule:
    if not getattr(parameter, _DIVIDED, False):
        return ShardingRule(name)
    return ShardingRule(name, int(getattr(parameter, _DIM)), stride=int(getattr(parameter, _STRIDE, 1)))


def _not_trained(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[str]:
    yield from (name for name, _ in model.named_buffers())
    known = None if optimizer is None else {id(one) for group in optimizer.param_groups for one in group["params"]}
    for name, one in model.named_parameters():
        if (not one.requires_grad) if known is None else id(one) not in known:
            yield name


def _groups(parameters: dict[str, Any], optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, ...]]:
    """The names in each group, in the order of the optimizer."""
    names = {id(one): name for name, one in parameters.items()}
    for group in optimizer.param_groups if optimizer is not None else ():
        yield tuple(names[id(one)] for one in group["params"] if id(one) in names)
