"""Configuration files that make a directory of weights a model of transformers or diffusers.

:mod:`rankless.state.capture` puts the files into a save on each rank, and rank 0 writes its own. transformers and
diffusers read these names, such as ``config.json``, and contents.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rankless.ondisk.data_files import CONFIG, GENERATION_CONFIG
from rankless.ondisk.wrapper_prefixes import has_adapters
from rankless.state.model.flat_model import FlatModel
from rankless.state.model.wrapper_modules import find_wrapped

#: The base classes of models in transformers and in diffusers, by name because these may not be installed.
_PRETRAINED = "transformers.modeling_utils.PreTrainedModel"
_DIFFUSERS_MIXIN = "diffusers.models.modeling_utils.ModelMixin"


def pretrained_files(parts: Sequence[object]) -> Iterator[tuple[str, bytes]]:
    """Yield the names and contents of the configuration files of a model, given by its parts.

    There are none for models of neither transformers nor diffusers, for wrappers that only expose the configuration of
    the wrapped model, and for models with PEFT adapters. The tensors of these models have other names, so transformers
    would initialize weights that it does not find.
    """
    model = parts[0].module if isinstance(parts[0], FlatModel) else parts[0]
    module = unwrap_model(model) if isinstance(model, nn.Module) else None
    if module is not None and not _is_wrapper(module):
        yield from base_config_files(module)


def base_config_files(module: nn.Module) -> Iterator[tuple[str, bytes]]:
    """Yield the names and contents of the configuration files of a module without its adapters."""
    config: Any = getattr(module, "config", None)
    if _has_base(module, _DIFFUSERS_MIXIN):
        yield CONFIG, _diffusers_config(module)
        return
    if not hasattr(config, "to_json_string"):
        return
    config = copy.deepcopy(config)
    config.architectures = [class_before_sharding(module).__name__]
    if isinstance(dtype := getattr(module, "dtype", None), torch.dtype):
        config.dtype = str(dtype).removeprefix("torch.")
    yield CONFIG, config.to_json_string().encode()
    generation = getattr(module, "generation_config", None)
    if generation is not None and hasattr(generation, "to_json_string"):
        yield GENERATION_CONFIG, generation.to_json_string().encode()


def _diffusers_config(module: Any) -> bytes:
    """Return the configuration of a model of diffusers, which writes the name of the model's class into it."""
    content = json.loads(module.to_json_string())
    content["_class_name"] = class_before_sharding(module).__name__
    return f"{json.dumps(content, indent=2, sort_keys=True)}\n".encode()


def class_before_sharding(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module by which transformers knows it: ``fully_shard`` derives a class of its own."""
    classes = (cls for cls in type(module).__mro__ if issubclass(cls, nn.Module))
    return next(cls for cls in classes if not issubclass(cls, FSDPModule))


def _is_wrapper(module: nn.Module) -> bool:
    """Return whether the configuration belongs to a model inside the module, or to the model without its adapters."""
    if has_adapters(name for name, _ in module.named_modules()):
        return True
    return not _is_pretrained(module) and any(map(_is_pretrained, module.modules()))


def _is_pretrained(module: nn.Module) -> bool:
    return _has_base(module, _PRETRAINED)


def _has_base(module: nn.Module, name: str) -> bool:
    """Return whether a module has the base class of this full name."""
    return any(f"{cls.__module__}.{cls.__qualname__}" == name for cls in type(module).__mro__)


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the module inside DDP, FSDP1, activation checkpointing and ``torch.compile``."""
    while (inner := find_wrapped(model)) is not None:
        model = inner
    return model
