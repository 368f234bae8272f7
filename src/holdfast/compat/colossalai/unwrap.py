"""The objects in the wrappers that ColossalAI's plugins put around them."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.errors import InvalidArgumentError


def plain_model(model: Any) -> Any:
    """The model in a plugin's wrapper, which knows how to give it."""
    while callable(getattr(model, "unwrap", None)):
        model = model.unwrap()
    return model


def plain_optimizer(optimizer: Any) -> Any:
    """The optimizer in a plugin's wrapper. Raises ``InvalidArgumentError`` for one that keeps states of its own."""
    inner = getattr(optimizer, "optim", None)
    if not isinstance(inner, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if type(optimizer).__name__ != "OptimizerWrapper":
        raise InvalidArgumentError(
            f"a {type(optimizer).__name__} keeps optimizer states in parts of its own, which only its plugin can tell: "
            "use torch's FSDP or ZeroRedundancyOptimizer instead"
        )
    return inner
