"""Materialization of models on the meta device: their tensors get memory, each rank's shards only.

Parameters are replaced in place, so that tied weights stay tied and an optimizer keeps its references. Tensors that are
not filled afterwards are initialized by transformers' ``_init_weights`` if the module is part of such a model, else by
the module's ``reset_parameters``.

:mod:`rankless.state.meta_models` calls it on each rank in the vote "reading" of a load, after the last check.

Matching needs only shapes and layouts. After all checks the tensors are exchanged by ``torch.utils.swap_tensors``, so
that all references to them stay valid.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rankless.engine.comm.vote import describe_error
from rankless.errors import RanklessError, StateError
from rankless.state.tensor_views import local_tensor
from rankless.torch_versions import fsdp_param_groups


class MetaTensor(msgspec.Struct, frozen=True):
    """A tensor on the meta device, with its name and the module that owns it."""

    name: str
    owner: nn.Module
    tensor: torch.Tensor


def meta_tensors(model: nn.Module) -> list[MetaTensor]:
    """Return the tensors of a model that have no memory, each once. Non-persistent buffers are included."""
    tensors: dict[int, MetaTensor] = {}
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):  # noqa: SLF001
            if tensor is not None and tensor.is_meta:
                tensors.setdefault(id(tensor), MetaTensor(f"{path}.{name}" if path else name, module, tensor))
    return list(tensors.values())


def find_initializer(model: nn.Module, owner: nn.Module) -> Callable[[], object] | None:
    """Return a function that initializes the tensors of a module; ``None`` if none is known."""
    init_weights = _find_init_weights(model, owner)
    if init_weights is not None:
        return partial(init_weights, owner)
    reset = getattr(owner, "reset_parameters", None)
    return reset if callable(reset) else None


def _find_init_weights(model: nn.Module, owner: nn.Module) -> Callable[[nn.Module], object] | None:
    """Return transformers' function that initializes a module: the innermost model around the module has it."""
    for module in _enclosing_modules(model, owner):
        init_weights = getattr(module, "_init_weights", None)
        if callable(init_weights) and hasattr(module, "config"):
            return init_weights  # type: ignore[no-any-return]
    return None


def initialize_outside(model: nn.Module, owner: nn.Module, values: Mapping[int, torch.Tensor]) -> None:
    """Initialize tensors of a module by the initializers of modules around it, as a model sets tables of its layers.

    ``values`` has these tensors, by the ``id`` of the tensors that ``owner`` has. The initializers run on a copy of the
    model where all other tensors have no memory, so that these alone change.
    """
    from rankless.state.model.module_copies import copy_modules  # noqa: PLC0415 - rarely needed

    copied = copy_modules(model)
    for module in model.modules():
        module_copy = copied.modules[id(module)]
        for tensors in ("_parameters", "_buffers"):
            getattr(module_copy, tensors).update(
                (name, values[id(tensor)] if module is owner and id(tensor) in values else _without_memory(tensor))
                for name, tensor in getattr(module, tensors).items()
                if tensor is not None
            )
    for module in list(_enclosing_modules(copied.model, copied.modules[id(owner)]))[1:]:
        init_weights = _find_init_weights(copied.model, module)
        if init_weights is not None:
            init_weights(module)


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    without = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(without, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else without


class _ShardWholeValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets an initializer copy a whole tensor, such as a computed table, into a sharded one, as into a plain one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See :class:`TorchDispatchMode`."""
        if func is torch.ops.aten.copy_.default and isinstance(args[0], DTensor) and not isinstance(args[1], DTensor):
            target, whole = args[:2]
            whole = whole.to(target.device).expand(target.shape)
            # Each rank has the whole tensor, so that nothing is sent.
            shard = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
            args = (target, shard, *args[2:])
        return func(*args, **(kwargs or {}))


def _enclosing_modules(model: nn.Module, owner: nn.Module) -> Iterator[nn.Module]:
    """Yield the module itself and those that contain it, innermost first."""
    (path,) = (name for name, module in model.named_modules() if module is owner)
    parts = path.split(".") if path else []
    for length in range(len(parts), -1, -1):
        yield model.get_submodule(".".join(parts[:length]))


def materialize(model: nn.Module, filled: set[int], set_outside: Collection[MetaTensor]) -> dict[int, torch.Tensor]:
    """Give every tensor of a model memory, and initialize those that will not be filled.

    ``filled`` are the ``id`` of the local shards that will be filled, and ``set_outside`` the tensors that only
    initializers of enclosing modules set. Returns the local shards with memory, by the ``id`` of the shards without
    memory that they replace.
    """
    unallocated = meta_tensors(model)
    local_ids = {id(meta.tensor): id(local_tensor(meta.tensor)) for meta in unallocated}
    devices, default = dict(_offloaded_parameters(model)), _default_device(model)
    with torch.no_grad():
        recurrent = _release_weights(unallocated)
        for meta in unallocated:
            _allocate_in_place(meta.tensor, devices.get(id(meta.tensor), default))
        for weights_owner in recurrent:
            weights_owner._init_flat_weights()  # noqa: SLF001
        for module in model.modules():
            if isinstance(module, FSDPModule):
                _reset_fsdp_views(module)
        unset = [meta for meta in unallocated if local_ids[id(meta.tensor)] not in filled]
        if unset:
            _initialize_tensors(model, unset, set_outside)
    return {local_ids[id(meta.tensor)]: local_tensor(meta.tensor) for meta in unallocated}


def _initialize_tensors(model: nn.Module, unset: Collection[MetaTensor], set_outside: Collection[MetaTensor]) -> None:
    """Run the initializers of the modules of some tensors. All modules have the same tensors afterwards."""
    entries = list(_list_entries(model))
    with _ShardWholeValues():  # type: ignore[no-untyped-call]
        for owner in dict.fromkeys(meta.owner for meta in unset):
            with _naming_code(model, owner):
                initialize = find_initializer(model, owner)
                if initialize is not None:
                    initialize()
                values = {id(meta.tensor): meta.tensor for meta in set_outside if meta.owner is owner}
                if values:
                    initialize_outside(model, owner, values)
        _put_back(entries, {id(meta.tensor) for meta in unset})


def _list_entries(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, torch.Tensor]]:
    """Yield each tensor of a model with its module, the table that the module has it in, and its name there."""
    for module in model.modules():
        for table in ("_parameters", "_buffers"):
            for name, tensor in getattr(module, table).items():
                if tensor is not None:
                    yield module, table, name, tensor


def _put_back(entries: Collection[tuple[nn.Module, str, str, torch.Tensor]], unset: set[int]) -> None:
    """Give modules the tensors again that initializers have replaced: a load fills them, or other modules have them.

    Those that are ``unset`` get the values of the new ones, unless these have another form: then all modules get these.
    """
    made: dict[int, torch.Tensor] = {}
    for module, _, name, tensor in entries:
        current = getattr(module, name, None)
        if current is None or current is tensor or id(tensor) not in unset:
            continue
        if (current.shape, current.dtype) == (tensor.shape, tensor.dtype):
            tensor.copy_(current)
        else:
            made[id(tensor)] = current
    for module, table, name, tensor in entries:
        kept = made.get(id(tensor), tensor)
        if getattr(module, name, None) is not kept:
            _set_entry(module, table, name, kept)


def _set_entry(module: nn.Module, table: str, name: str, tensor: torch.Tensor) -> None:
    for other in (module._parameters, module._buffers, vars(module)):  # noqa: SLF001
        if other is not getattr(module, table):
            other.pop(name, None)
    getattr(module, table)[name] = tensor
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()  # noqa: SLF001


@contextmanager
def _naming_code(model: nn.Module, owner: nn.Module) -> Iterator[None]:
    """Raise ``StateError`` with the class and the name of a module if its initializer fails."""
    try:
        yield
    except RanklessError:
        raise
    except Exception as error:
        (path,) = (name for name, module in model.named_modules() if module is owner)
        subject = f"module {path!r} ({type(owner).__qualname__})" if path else type(owner).__qualname__
        raise StateError(
            f"code that initializes {subject} failed after the model got memory, and it has no values now: do not use "
            f"it. {describe_error(error)}"
        ) from error


def find_held(tensors: Iterable[MetaTensor]) -> Iterator[MetaTensor]:
    """Yield the tensors without memory that cannot be replaced in place, because others are views of them."""
    for meta in tensors:
        # The modules of recurrent layers keep weak references, which they can make anew.
        if _is_held(meta.tensor) or (weakref.getweakrefs(meta.tensor) and not isinstance(meta.owner, nn.RNNBase)):
            yield meta


def _is_held(tensor: torch.Tensor) -> bool:
    """Return whether something else refers to a tensor than Python and, until the next backward pass, its gradient."""
    count = tensor._use_count()  # type: ignore[attr-defined]  # noqa: SLF001 - what torch checks when it swaps tensors
    if count == 2 and tensor.is_leaf and tensor.requires_grad:  # noqa: PLR2004 - with its gradient's node
        node = torch.autograd.graph.get_gradient_edge(tensor).node
        is_held: bool = tensor._use_count() != count  # type: ignore[attr-defined]  # noqa: SLF001
        del node  # until here, so that it is the same one
        return is_held
    return bool(count > 1)


def _release_weights(unallocated: Iterable[MetaTensor]) -> list[nn.RNNBase]:
    """Remove the weak references that LSTM, GRU and RNN keep to their weights, so that torch can swap the tensors.

    Return the modules: their ``_init_flat_weights`` creates the references again.
    """
    modules = list(dict.fromkeys(meta.owner for meta in unallocated if isinstance(meta.owner, nn.RNNBase)))
    for module in modules:
        module._flat_weight_refs = []  # noqa: SLF001
    return modules


def _allocate_in_place(tensor: torch.Tensor, device: torch.device) -> None:
    """Replace a tensor by one with memory; it stays the same object."""
    allocated: torch.Tensor
    if isinstance(tensor, DTensor):
        local = torch.empty_like(tensor._local_tensor, device=device)  # noqa: SLF001
        allocated = DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    else:
        allocated = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        allocated = nn.Parameter(allocated, requires_grad=tensor.requires_grad)
    attributes = {name: value for name, value in vars(tensor).items() if name not in vars(allocated)}
    vars(allocated).update(attributes)
    torch.utils.swap_tensors(tensor, allocated)  # type: ignore[no-untyped-call]


def _default_device(model: nn.Module) -> torch.device:
    """Return the device type of the parameters' mesh, or torch's default device if there is none."""
    device_types = (
        parameter.device_mesh.device_type for parameter in model.parameters() if isinstance(parameter, DTensor)
    )
    device_type = next(device_types, None)
    return torch.empty(0).device if device_type is None else torch.device(device_type)


def _offloaded_parameters(model: nn.Module) -> Iterator[tuple[int, torch.device]]:
    """Yield the parameters that FSDP keeps in host memory, by ``id``, with that device."""
    for parameter in _fsdp_parameters(model.modules()):
        if parameter.offload_to_cpu:
            yield id(parameter.sharded_param), torch.device("cpu")


def _reset_fsdp_views(module: FSDPModule) -> None:
    """Let FSDP update its views of its parameters' memory, as after ``to_empty``."""
    for parameter in _fsdp_parameters([module]):  # type: ignore[list-item]
        parameter.reset_sharded_param()


def _fsdp_parameters(modules: Iterable[nn.Module]) -> Iterator[Any]:
    for module in modules:
        if isinstance(module, FSDPModule):
            for group in fsdp_param_groups(module._get_fsdp_state()):  # noqa: SLF001
                yield from group.fsdp_params
