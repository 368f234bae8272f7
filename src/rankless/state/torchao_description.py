"""torchao's own description of a quantized tensor, for files that torchao and transformers read.

:mod:`rankless.state.model.model_traversal` calls it on each rank. The text is stored, and a load compares it only if
nothing else describes the tensor.
"""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

import torch


def describe_for_torchao(local: torch.Tensor, shape: tuple[int, ...]) -> str | None:
    """Return torchao's description of a tensor as JSON, or ``None`` if torchao does not store tensors of the class.

    ``local`` is the shard on this rank of a tensor of ``shape``. Called for each tensor of a wrapper subclass.
    """
    if not type(local).__module__.startswith("torchao."):
        return None
    try:
        safetensors_utils: Any = import_module("torchao.prototype.safetensors.safetensors_utils")
    except ImportError:  # before version 0.15
        return None
    if type(local).__name__ not in safetensors_utils.ALLOWED_TENSORS_SUBCLASSES:
        return None
    try:
        text = json.dumps(local, cls=safetensors_utils.TensorSubclassAttributeJSONEncoder)
    except (AttributeError, TypeError, ValueError):  # save_pretrained fails, but a checkpoint needs no description
        return None
    if tuple(local.shape) == shape:
        return text
    description = json.loads(text)
    settings = {
        name: list(shape) if value == list(local.shape) else value for name, value in description["_data"].items()
    }
    return json.dumps({**description, "_data": settings})
