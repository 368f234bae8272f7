"""Copies of a model's modules. Its code can run on them without an effect on its tensors.

:mod:`rankless.state.model.initializer_probe` and :mod:`rankless.state.model.materialize` run initializers on such
copies, on each rank of a load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class ModelCopy:
    """A model's modules without their tensors, and the modules by the ``id`` of those that they stand for."""

    model: nn.Module
    modules: Mapping[int, nn.Module]


def copy_modules(model: nn.Module) -> ModelCopy:
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
    return ModelCopy(modules[id(model)], modules)
