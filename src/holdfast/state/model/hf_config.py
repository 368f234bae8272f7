"""The files that make a folder of weights a transformers model: its configurations."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from holdfast.ondisk.validation import strip_wrapper_prefixes

#: transformers' base class by name, as transformers need not be there.
_PRETRAINED = "transformers.modeling_utils.PreTrainedModel"


def pretrained_files(parts: Sequence[object]) -> Iterator[tuple[str, bytes]]:
    """Names and contents of these files for the parts of a model; none for models that are not transformers'.

    What wraps such a model and hands on its configuration is none of them, and neither is one with PEFT's adapters in
    it: its tensors have other names, and transformers would open the folder with weights that it makes up.
    """
    module = unwrap_model(parts[0]) if isinstance(parts[0], nn.Module) else None
    config: Any = getattr(module, "config", None)
    if module is None or not hasattr(config, "to_json_string") or _is_wrapper(module):
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


def _is_wrapper(module: nn.Module) -> bool:
    """Whether the configuration is of a model inside of the module, or of one without the adapters in it."""
    if has_adapters(name for name, _ in module.named_modules()):
        return True
    return not _is_pretrained(module) and any(map(_is_pretrained, module.modules()))


def _is_pretrained(module: nn.Module) -> bool:
    return any(f"{kind.__module__}.{kind.__qualname__}" == _PRETRAINED for kind in type(module).__mro__)


def has_adapters(names: Iterable[str]) -> bool:
    """Whether names, of modules or of tensors, are those of a model with PEFT's adapters in it."""
    return any(
        "base_layer" in name.split(".")
        or f"{strip_wrapper_prefixes(name)}.".startswith(("base_model.model.", "prompt_encoder."))
        for name in names
    )


def unwrap_model(model: nn.Module) -> nn.Module:
    """The module inside DDP, FSDP1 and ``torch.compile``."""
    while True:
        if isinstance(model, DistributedDataParallel | FullyShardedDataParallel):
            model = model.module
        elif isinstance(inner := dict(model.named_children()).get("_orig_mod"), nn.Module):
            model = inner
        else:
            return model
