"""Models on the meta device: their tensors get memory, each rank's parts only, and stay the objects that they are.

Parameters are replaced in place, so that tied weights stay tied and an optimizer keeps what it knows. What is not
filled afterwards is initialised as its module does that: by transformers' ``_init_weights`` where the module is part of
such a model, else by the module's ``reset_parameters``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from holdfast.state.tensors import local_tensor


@dataclass(frozen=True)
class MetaTensor:
    """A tensor on the meta device: its name, and the module that has it."""

    name: str
    owner: nn.Module
    tensor: torch.Tensor


def meta_tensors(model: nn.Module) -> list[MetaTensor]:
    """The tensors of a model that have no memory, each once; buffers that are not in its state dict, too."""
    found: dict[int, MetaTensor] = {}
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):  # noqa: SLF001
            if tensor is not None and tensor.is_meta:
                found.setdefault(id(tensor), MetaTensor(f"{path}.{name}" if path else name, module, tensor))
    return list(found.values())


def initializer(model: nn.Module, owner: nn.Module) -> Callable[[], object] | None:
    """What gives the tensors of a module their first values; ``None`` where nothing is known to."""
    for above in _above(model, owner):
        init = getattr(above, "_init_weights", None)
        if callable(init) and hasattr(above, "config"):
            return lambda: init(owner)
    reset = getattr(owner, "reset_parameters", None)
    return reset if callable(reset) else None


def _above(model: nn.Module, owner: nn.Module) -> Iterator[nn.Module]:
    """The module itself and those that it is in, the nearest first."""
    (path,) = (name for name, module in model.named_modules() if module is owner)
    parts = path.split(".") if path else []
    for length in range(len(parts), -1, -1):
        yield model.get_submodule(".".join(parts[:length]))


def materialize(model: nn.Module, filled: set[int]) -> dict[int, torch.Tensor]:
    """Give every tensor of a model memory, and initialise those that will not be filled.

    ``filled`` are the ``id`` of the local parts that will be. Returns, by the ``id`` of a local part that had no
    memory, the one that has.
    """
    every = meta_tensors(model)
    homes = {id(one.tensor): id(local_tensor(one.tensor)) for one in every}
    devices, default = dict(_offloaded(model)), _device(model)
    with torch.no_grad():
        for one in every:
            _give_memory(one.tensor, devices.get(id(one.tensor), default))
        for module in model.modules():
            if isinstance(module, FSDPModule):
                _tell(module)
        for owner in dict.fromkeys(one.owner for one in every if homes[id(one.tensor)] not in filled):
            make = initializer(model, owner)
            if make is not None:
                make()
    return {homes[id(one.tensor)]: local_tensor(one.tensor) for one in every}


def _give_memory(tensor: torch.Tensor, device: torch.device) -> None:
    """Replace a tensor by one with memory; it stays the same object."""
    made: torch.Tensor
    if isinstance(tensor, DTensor):
        local = torch.empty_like(tensor._local_tensor, device=device)  # noqa: SLF001
        made = DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    else:
        made = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
    kept = {name: value for name, value in vars(tensor).items() if name not in vars(made)}
    vars(made).update(kept)
    torch.utils.swap_tensors(tensor, made)  # type: ignore[no-untyped-call]


def _device(model: nn.Module) -> torch.device:
    """Where tensors go: to the kind of device that the parameters' mesh is of, else to torch's default device."""
    meshes = (one.device_mesh.device_type for one in model.parameters() if isinstance(one, DTensor))
    kind = next(meshes, None)
    return torch.get_default_device() if kind is None else torch.device(kind)


def _offloaded(model: nn.Module) -> Iterator[tuple[int, torch.device]]:
    """Parameters that FSDP keeps in the memory of the host."""
    for parameter in _fsdp_parameters(model.modules()):
        if parameter.offload_to_cpu:
            yield id(parameter.sharded_param), torch.device("cpu")


def _tell(module: FSDPModule) -> None:
    """FSDP keeps views of its parameters' memory, as after ``to_empty``."""
    for parameter in _fsdp_parameters([module]):  # type: ignore[list-item]
        parameter.reset_sharded_param()


def _fsdp_parameters(modules: Iterable[nn.Module]) -> Iterator[Any]:
    for module in modules:
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:  # noqa: SLF001
                yield from group.fsdp_params
