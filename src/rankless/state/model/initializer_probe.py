"""Proof that initializers set tensors, found by running them on a copy of the model that shares no tensor with it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from rankless.state.model.materialize import MetaTensor, find_initializer

#: The byte with which the copies of tensors are filled before an initializer runs.
_PATTERN = 0xA5


@dataclass(frozen=True)
class _ModelCopy:
    """A model's modules without their tensors, and the modules by the ``id`` of those that they stand for."""

    model: nn.Module
    modules: Mapping[int, nn.Module]


def explain_uninitialized(model: nn.Module, tensors: Collection[MetaTensor]) -> dict[str, str]:
    """Return why the ``tensors`` of a model on the meta device would get no value, by name. The model is not changed.

    Called by :class:`rankless.state.meta_models.MetaModels` for those that are not loaded.
    """
    reasons: dict[str, str] = {}
    copied = _copy_modules(model)
    for owner in dict.fromkeys(meta.owner for meta in tensors):
        of_owner = [meta for meta in tensors if meta.owner is owner]
        reasons |= _explain_owner(copied, owner, of_owner)
    return reasons


def _explain_owner(copied: _ModelCopy, owner: nn.Module, tensors: Collection[MetaTensor]) -> dict[str, str]:
    owner_copy, kind = copied.modules[id(owner)], type(owner).__qualname__
    initialize = find_initializer(copied.model, owner_copy)
    if initialize is None:
        return {meta.name: f"{kind} has no reset_parameters() to initialize it" for meta in tensors}
    for module, module_copy in ((module, copied.modules[id(module)]) for module in owner.modules()):
        module_copy._parameters = {  # noqa: SLF001
            name: parameter if parameter is None else nn.Parameter(_fill_copy(parameter), parameter.requires_grad)
            for name, parameter in module._parameters.items()  # noqa: SLF001
        }
        module_copy._buffers = {  # noqa: SLF001
            name: buffer if buffer is None else _fill_copy(buffer)
            for name, buffer in module._buffers.items()  # noqa: SLF001
        }
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            initialize()
    except Exception as error:  # noqa: BLE001 - code of the user
        return {meta.name: f"the code of {kind} that would initialize it failed: {error}" for meta in tensors}
    names = (meta.name.rpartition(".")[2] for meta in tensors)
    written = [_is_written(getattr(owner_copy, name)) for name in names]
    reason = f"neither reset_parameters() of {kind} nor _init_weights() of its model sets it"
    return {meta.name: reason for meta, is_written in zip(tensors, written, strict=True) if not is_written}


def _copy_modules(model: nn.Module) -> _ModelCopy:
    """Copy the modules of a model. The attributes are shared, and there are no tensors."""
    modules: dict[int, nn.Module] = {}
    for module in model.modules():
        module_copy = modules[id(module)] = object.__new__(type(module))
        vars(module_copy).update(vars(module))
        for tensors in ("_parameters", "_buffers"):
            setattr(module_copy, tensors, dict.fromkeys(getattr(module, tensors)))
    for module in model.modules():
        children = {name: child and modules[id(child)] for name, child in module._modules.items()}  # noqa: SLF001
        vars(modules[id(module)])["_modules"] = children
    return _ModelCopy(modules[id(model)], modules)


def _fill_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same kind in memory, with the pattern in every byte. Of a sharded tensor it is whole."""
    filled = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    filled.reshape(-1).view(torch.uint8).fill_(_PATTERN)
    vars(filled).update(vars(tensor) if type(tensor) in {torch.Tensor, nn.Parameter, nn.Buffer} else {})
    return filled


def _is_written(tensor: torch.Tensor | None) -> bool:
    """Return whether every element of a tensor was set.

    Elements of one byte may have the pattern as their value: of these, one that has another one is enough.
    """
    if tensor is None or tensor.is_meta:
        return False
    width = tensor.element_size()
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).reshape(tensor.numel(), width)
    unset = (raw == _PATTERN).all(1)
    return not bool(unset.all() if width == 1 and len(unset) else unset.any())
