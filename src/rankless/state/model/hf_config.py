"""Configuration files that make a directory of weights a transformers model."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rankless.ondisk.wrapper_prefixes import strip_wrapper_prefixes
from rankless.state.model.flat_model import FlatModel
from rankless.state.model.wrapper_modules import find_wrapped

#: The file with the configuration of a model.
CONFIG = "config.json"

#: The names under which it has the dtype of the weights, now and before transformers 5.
_DTYPE_KEYS = ("dtype", "torch_dtype")

#: How deep configurations of parts are nested at most, and the size of a file up to which it is indented, in bytes.
_MAX_DEPTH, _MAX_INDENTED = 8, 64 * 2**10

#: transformers' base class, by name because transformers may not be installed.
_PRETRAINED = "transformers.modeling_utils.PreTrainedModel"


def pretrained_files(parts: Sequence[object]) -> Iterator[tuple[str, bytes]]:
    """Yield the names and contents of the configuration files of a model, given by its parts.

    There are none for models that are not transformers', for wrappers that only expose the configuration of the wrapped
    model, and for models with PEFT adapters: their tensors have other names, so transformers would initialize weights
    that it does not find.
    """
    model = parts[0].module if isinstance(parts[0], FlatModel) else parts[0]
    module = unwrap_model(model) if isinstance(model, nn.Module) else None
    if module is not None and not _is_wrapper(module):
        yield from base_config_files(module)


def base_config_files(module: nn.Module) -> Iterator[tuple[str, bytes]]:
    """Yield the names and contents of the configuration files of a module without its adapters."""
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "to_json_string"):
        return
    config = copy.deepcopy(config)
    config.architectures = [class_before_sharding(module).__name__]
    if isinstance(dtype := getattr(module, "dtype", None), torch.dtype):
        config.dtype = str(dtype).removeprefix("torch.")
    yield CONFIG, config.to_json_string().encode()
    generation = getattr(module, "generation_config", None)
    if generation is not None and hasattr(generation, "to_json_string"):
        yield "generation_config.json", generation.to_json_string().encode()


def class_before_sharding(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module by which transformers knows it: ``fully_shard`` derives a class of its own."""
    classes = (cls for cls in type(module).__mro__ if issubclass(cls, nn.Module))
    return next(cls for cls in classes if not issubclass(cls, FSDPModule))


def set_config_dtype(config: bytes, dtype: str) -> bytes:
    """Return a ``config.json`` that says that the weights have this dtype, wherever it names one.

    transformers loads a model in the dtype that its configuration names, not in that of the file. Configurations of
    parts of the model (``text_config``) name one, too. Bytes that are not JSON are returned as they are.
    """
    try:
        content = _replace_dtypes(json.loads(config), dtype, _MAX_DEPTH)
        indent = 2 if len(config) <= _MAX_INDENTED else None  # indented lists inside of lists take very much space
        return json.dumps(content, indent=indent, sort_keys=True).encode() + b"\n"
    except (ValueError, RecursionError):
        return config


def _replace_dtypes(content: Any, dtype: str, depth: int) -> Any:
    if not isinstance(content, dict) or not depth:
        return content
    replaced = {key: dtype for key in _DTYPE_KEYS if isinstance(content.get(key), str)}
    parts = {key for key in content if key.endswith("_config") and key != "quantization_config"}
    return content | replaced | {key: _replace_dtypes(content[key], dtype, depth - 1) for key in parts}


def _is_wrapper(module: nn.Module) -> bool:
    """Return whether the configuration is that of a model inside the module, or of the model without its adapters."""
    if has_adapters(name for name, _ in module.named_modules()):
        return True
    return not _is_pretrained(module) and any(map(_is_pretrained, module.modules()))


def _is_pretrained(module: nn.Module) -> bool:
    return any(f"{cls.__module__}.{cls.__qualname__}" == _PRETRAINED for cls in type(module).__mro__)


def has_adapters(names: Iterable[str]) -> bool:
    """Return whether names of modules or tensors are those of a model with PEFT adapters.

    PEFT's prompts are beside its ``base_model``; models of images have a ``prompt_encoder`` that is a part of them.
    """
    dotted = [f"{strip_wrapper_prefixes(name)}." for name in names]
    has_prompts = any(name.startswith("prompt_encoder.") for name in dotted)
    return any(
        ".base_layer." in f".{name}" or name.startswith("base_model.model." if not has_prompts else "base_model.")
        for name in dotted
    )


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the module inside DDP, FSDP1, activation checkpointing and ``torch.compile``."""
    while (inner := find_wrapped(model)) is not None:
        model = inner
    return model
