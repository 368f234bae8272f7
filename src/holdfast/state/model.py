"""A model's tensors under clean names, whatever wraps it, and its tied weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from holdfast.errors import InvalidArgumentError, StateError, UnsupportedTensorError
from holdfast.state.tensors import shared

#: Attributes by which wrappers hold the module they wrap, where only wrappers use the name.
_WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})

#: The name under which ``state_dict`` keeps what ``get_extra_state`` returns.
_EXTRA = "_extra_state"


@dataclass(frozen=True)
class ModelView:
    """A model as a checkpoint sees it.

    ``tensors`` are live, each once, by FQN; ``tied`` maps further names of one to the name it has there. ``extra``
    are values of a state dict that are not tensors, by name, and what ``get_extra_state`` gave; ``raw`` are the names
    with wrappers' parts.
    """

    tensors: dict[str, torch.Tensor]
    tied: dict[str, str]
    buffers: frozenset[str]
    extra: dict[str, Any] = field(default_factory=dict)
    module: nn.Module | None = None
    raw: dict[str, str] = field(default_factory=dict)

    def name_of_parameters(self) -> dict[int, str]:
        """The FQN of each parameter, by its ``id``."""
        return {id(tensor): name for name, tensor in self.tensors.items()}


def view(model: object) -> ModelView:
    """Look at a module or at a state dict. Raises ``StateError`` where two tensors have one name."""
    if isinstance(model, nn.Module):
        return _view_module(model)
    if isinstance(model, Mapping):
        return _view(dict(model), frozenset(), frozenset())
    raise InvalidArgumentError(f"model must be a torch.nn.Module or a state dict, not {type(model).__qualname__}")


def _view_module(model: nn.Module) -> ModelView:
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise UnsupportedTensorError(
            "the model is wrapped by FSDP1 (FullyShardedDataParallel); shard it with FSDP2's fully_shard"
        )
    module = unwrap(model)
    parts = _wrapper_prefixes(module)
    state: dict[str, Any] = {}
    raw_names: dict[str, str] = {}
    for raw, value in module.state_dict(keep_vars=True).items():
        name = _clean(raw, parts)
        if name in state:
            raise StateError(f"the model has two entries named {name!r} once wrappers' names are taken off")
        state[name] = value
        raw_names[name] = raw
    known = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and id(value) not in known and not _is_extra(name):
            raise StateError(
                f"{name!r} in the model's state_dict is made up by a hook: neither a parameter nor a buffer, "
                "it could not be put back; pass the state dict itself"
            )
    parameters = {id(parameter) for parameter in module.parameters()}
    buffers = frozenset(
        name for name, value in state.items() if isinstance(value, torch.Tensor) and id(value) not in parameters
    )
    found = _view(state, buffers, frozenset(getattr(module, "_tied_weights_keys", None) or ()))
    return ModelView(found.tensors, found.tied, found.buffers, found.extra, module, raw_names)


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DDP and ``torch.compile``."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := dict(model.named_children()).get("_orig_mod"), nn.Module):
            model = inner
        else:
            return model


def _wrapper_prefixes(module: nn.Module) -> list[str]:
    """The prefixes, with ``module.``, of parts that are wrapped by DDP on their own."""
    return [
        f"{name}.module."
        for name, part in module.named_modules(remove_duplicate=False)
        if isinstance(part, DistributedDataParallel)
    ]


def _clean(name: str, ddp: list[str]) -> str:
    for prefix in sorted(ddp, key=len, reverse=True):
        if name.startswith(prefix):
            name = prefix.removesuffix("module.") + name.removeprefix(prefix)
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS)


def _view(state: Mapping[str, Any], buffers: frozenset[str], aliases: frozenset[str]) -> ModelView:
    tensors: dict[str, torch.Tensor] = {}
    extra: dict[str, Any] = {}
    for name, value in state.items():
        if not isinstance(name, str):
            raise InvalidArgumentError(f"a state dict's keys are names, not {name!r}")
        if isinstance(value, torch.Tensor) and not _is_extra(name):
            tensors[name] = value
        else:
            extra[name] = value
    tied: dict[str, str] = {}
    for same in shared(tensors):
        # transformers lists the names that it drops when it saves; a checkpoint keeps the other one.
        kept = next((name for name in same if name not in aliases), same[0])
        tied.update((name, kept) for name in same if name != kept)
    for name in tied:
        del tensors[name]
    return ModelView(tensors, tied, buffers, extra)


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == _EXTRA


def set_extra(module: nn.Module, name: str, value: object) -> None:
    """Hand back what ``get_extra_state`` of a part of ``module`` gave."""
    owner = name.removesuffix(_EXTRA).removesuffix(".")
    module.get_submodule(owner).set_extra_state(value)


def companions(module: nn.Module | None) -> dict[str, bytes]:
    """The files that make a folder of weights a transformers model: its configurations. None for other models."""
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "save_pretrained") or not hasattr(config, "to_json_string"):
        return {}
    config = copy.deepcopy(config)
    # fully_shard() puts classes of its own before the model's; transformers must find the one it knows.
    kind = next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))
    config.architectures = [kind.__name__]
    if isinstance(dtype := getattr(module, "dtype", None), torch.dtype):
        config.dtype = str(dtype).removeprefix("torch.")
    files = {"config.json": config.to_json_string().encode()}
    generation = getattr(module, "generation_config", None)
    if generation is not None and hasattr(generation, "to_json_string"):
        files["generation_config.json"] = generation.to_json_string().encode()
    return files
