"""Unwraps the models and optimizers that ColossalAI's plugins have wrapped."""

from __future__ import annotations

from typing import Any

import torch

from rankless.errors import InvalidArgumentError


def plain_model(model: Any) -> Any:
    """Return the model inside a plugin's wrappers, by their own ``unwrap`` method."""
    while callable(getattr(model, "unwrap", None)):
        model = model.unwrap()
    return model


def plain_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside a plugin's wrapper.

    Raises ``InvalidArgumentError`` for a wrapper that keeps optimizer states itself.
    """
    inner = getattr(optimizer, "optim", None)
    if not isinstance(inner, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if type(optimizer).__name__ != "OptimizerWrapper":
        raise InvalidArgumentError(
            f"{type(optimizer).__name__} keeps optimizer states in shards that only its plugin can read: "
            "use torch's FSDP or ZeroRedundancyOptimizer instead"
        )
    return inner
