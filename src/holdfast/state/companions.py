"""The files that make a folder of weights a transformers model: its configurations."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel


def companions(parts: Sequence[object]) -> Iterator[tuple[str, bytes]]:
    """Names and contents of these files for the parts of a model; none for models that are not transformers'."""
    module = unwrap(parts[0]) if isinstance(parts[0], nn.Module) else None
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "save_pretrained") or not hasattr(config, "to_json_string"):
        return
    config = copy.deepcopy(config)
    # fully_shard() puts classes of its own before the model's; transformers must find the one it knows.
    kind = next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))
    config.architectures = [kind.__name__]
    if isinstance(dtype := getattr(module, "dtype", None), torch.dtype):
        config.dtype = str(dtype).removeprefix("torch.")
    yield "config.json", config.to_json_string().encode()
    generation = getattr(module, "generation_config", None)
    if generation is not None and hasattr(generation, "to_json_string"):
        yield "generation_config.json", generation.to_json_string().encode()


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DDP, FSDP1 and ``torch.compile``."""
    while True:
        if isinstance(model, DistributedDataParallel | FullyShardedDataParallel):
            model = model.module
        elif isinstance(inner := dict(model.named_children()).get("_orig_mod"), nn.Module):
            model = inner
        else:
            return model
