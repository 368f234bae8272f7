"""Tiny models of a family, whose tensors are all different, plain or sharded by FSDP2, and how two of them differ."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Recipe:
    """A model that each process can build: the name of its class in transformers, and its configuration."""

    model_class: str
    config: Any

    def build(self, seed: int) -> Any:
        """Return the model with tensors that depend on the seed, but for integers and what is never stored."""
        torch.manual_seed(seed)
        model = self.find_class()._from_config(copy.deepcopy(self.config))
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point() and name not in (model._keys_to_ignore_on_save or ()):
                tensor.copy_(torch.rand(tensor.shape, generator=generator))
        return model.eval()

    def build_on_meta(self) -> Any:
        """Return the model without values, as large models are built before they are loaded."""
        with torch.device("meta"):
            return self.find_class()._from_config(copy.deepcopy(self.config)).eval()

    def find_class(self) -> Any:
        """Return the class of the model."""
        return getattr(transformers, self.model_class)


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard a model with FSDP2, each layer of a list by itself. Scalars stay whole: FSDP2 does not shard them."""
    whole = {parameter for parameter in model.parameters() if parameter.dim() == 0}
    for layer in _layers_of(model):
        fully_shard(layer, mesh=mesh, ignored_params=whole)
    fully_shard(model, mesh=mesh, ignored_params=whole)
    return model


def _layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of lists that share no parameter with the rest of the model, inner ones first."""
    uses = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    layers = [layer for module in model.modules() if isinstance(module, nn.ModuleList) for layer in module]
    return [
        layer
        for layer in reversed(layers)
        if not isinstance(layer, nn.ModuleList | nn.ModuleDict) and _has_own_parameters(layer, uses)
    ]


def _has_own_parameters(layer: nn.Module, uses: Counter[nn.Parameter]) -> bool:
    uses_here = Counter(parameter for _, parameter in layer.named_parameters(remove_duplicate=False))
    return bool(uses_here) and all(uses_here[parameter] == uses[parameter] for parameter in uses_here)


def find_differences(expected: nn.Module, model: nn.Module) -> list[str]:
    """Return how the tensors that a model holds on this rank differ from the expected ones, bit for bit."""
    ours, theirs = _tensors_of(model), _tensors_of(expected)
    names = [f"{name} on one side only" for name in sorted(ours.keys() ^ theirs.keys())]
    return names + [name for name in ours.keys() & theirs.keys() if not is_equal(ours[name], theirs[name])]


def _tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers by each of their names, also buffers that are not stored."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return dict(named)


def is_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bytes on this rank."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(_bytes_of(first), _bytes_of(second))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().contiguous().flatten().view(torch.uint8)
