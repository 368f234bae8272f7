"""The sharding spec of a model, from the attributes that its NxD or Megatron layers have set on parameters.

:func:`rankless.nxd.load_checkpoint` asks it on each rank; users call it to keep the text. The text can be stored as a
spec file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from torch import nn

from rankless.nxd.reader.sharding_spec import ShardingRule, ShardingSpec

#: Attributes that such a layer sets on a parameter which ranks divide.
_DIVIDED, _DIM, _STRIDE = "tensor_model_parallel", "partition_dim", "partition_stride"


def sharding_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
    """Return the text of a spec file: the sharding of the model, and the parameters in each of the optimizer's groups.

    Call it where the checkpointed model exists, on one rank of each pipeline stage, and keep the text, because NxD's
    checkpoints contain none of this. A parameter without such attributes is taken to be whole on every rank.
    """
    parameters = dict(model.named_parameters())
    rules = [
        *(_sharding_rule(name, parameter) for name, parameter in parameters.items()),
        *(ShardingRule(name) for name, _ in model.named_buffers()),
    ]
    spec = ShardingSpec(
        tuple(rules), tuple(_untrained_names(model, optimizer)), tuple(_param_groups(parameters, optimizer))
    )
    return msgspec.json.encode(spec).decode()


def _sharding_rule(name: str, parameter: nn.Parameter) -> ShardingRule:
    """Return the rule of a parameter, from its attributes."""
    if not getattr(parameter, _DIVIDED, False):
        return ShardingRule(name)
    return ShardingRule(name, int(getattr(parameter, _DIM)), stride=int(getattr(parameter, _STRIDE, 1)))


def _untrained_names(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[str]:
    """Yield the names of buffers and of parameters that are not trained.

    These are the parameters that the optimizer does not have; without an optimizer, the frozen ones.
    """
    yield from (name for name, _ in model.named_buffers())
    trained_ids = (
        None
        if optimizer is None
        else {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    )
    for name, parameter in model.named_parameters():
        if (not parameter.requires_grad) if trained_ids is None else id(parameter) not in trained_ids:
            yield name


def _param_groups(parameters: dict[str, Any], optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, ...]]:
    """Yield the parameter names of each param group, in the order of the optimizer."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    for group in optimizer.param_groups if optimizer is not None else ():
        yield tuple(names[id(parameter)] for parameter in group["params"] if id(parameter) in names)
