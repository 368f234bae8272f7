"""A model's tensors under clean names, whatever wraps it, and its tied weights."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._flat_param import FlatParameter
from torch.nn.parallel import DistributedDataParallel

from holdfast.engine.layouts import Flat, Layout, Mesh, Replicate
from holdfast.errors import InvalidArgumentError, StateError
from holdfast.layout.names import unwrapped
from holdfast.state import fsdp1
from holdfast.state.companions import unwrap
from holdfast.state.fsdp1 import FlatPart
from holdfast.state.named import EXTRA, Handle, ModelView, merge
from holdfast.state.slots import by_slot
from holdfast.state.tensors import NAMES, Described, describe, shared


def slots(model: object) -> dict[str, list[Any]]:
    """The models passed, by slot; each a list of its parts."""
    return by_slot("model", model, _is_state_dict)


def _is_state_dict(given: Mapping[str, Any]) -> bool:
    return not given or not all(isinstance(one, nn.Module | Mapping | list | tuple) for one in given.values())


def view(parts: Sequence[object]) -> ModelView:
    """Look at the parts of one model, modules or state dicts.

    Raises ``StateError`` where two different tensors have one name.
    """
    views = [_view_part(part) for part in parts]
    if len(views) == 1:
        return views[0]
    whole = ModelView()
    for one in views:
        merge(whole, one)
    return whole


def _view_part(model: object) -> ModelView:
    if isinstance(model, nn.Module):
        return _view_fsdp1(model) if fsdp1.wrapped(model) else _view_module(model)
    if isinstance(model, MutableMapping):
        found = _view(dict(model), set(), frozenset())
        found.owners = {name: (model, name) for name in found.extra}
        return found
    raise InvalidArgumentError(
        f"model must be a torch.nn.Module or a state dict, or a list or dict of them, not {type(model).__qualname__}"
    )


def _view_module(model: nn.Module) -> ModelView:
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
    buffers = {name for name, value in state.items() if isinstance(value, torch.Tensor) and id(value) not in parameters}
    found = _view(state, buffers, frozenset(getattr(module, "_tied_weights_keys", None) or ()))
    found.owners = {name: (module, raw_names[name]) for name in found.extra}
    return found


def _view_fsdp1(model: nn.Module) -> ModelView:
    """FSDP1's flat parameters, and beside them what it leaves alone: buffers, ignored parameters, extra state."""
    found = ModelView()
    taken = set()
    for part in fsdp1.flat_parts(model):
        handle = Handle(part.fqn, _describe_flat(part), part)
        found.tensors[part.fqn] = handle.like
        found.tied.update(dict.fromkeys(part.tied, part.fqn))
        found.handles[id(part.parameter)] = (*found.handles.get(id(part.parameter), ()), handle)
        taken.add(id(part.parameter))
    state: dict[str, Any] = {}
    buffers: set[str] = set()
    for name, module in fsdp1.named_modules(model):
        prefix = f"{name}." if name else ""
        own = {key: one for key, one in module._parameters.items() if one is not None}  # noqa: SLF001
        state.update((prefix + key, one) for key, one in own.items() if not _is_flat(one, taken))
        kept = {key for key in module._buffers if key not in module._non_persistent_buffers_set}  # noqa: SLF001
        here = {prefix + key: module._buffers[key] for key in kept if module._buffers[key] is not None}  # noqa: SLF001
        buffers |= here.keys()
        state |= here
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            state[prefix + EXTRA] = module.get_extra_state()
            found.owners[prefix + EXTRA] = (module, EXTRA)
    rest = _view(state, buffers, frozenset())
    rest.owners = found.owners
    merge(found, rest)
    return found


def _describe_flat(part: FlatPart) -> Described:
    mesh = Mesh(part.mesh_shape, part.mesh_ranks)
    layout = Layout(mesh, (*(Replicate() for _ in part.mesh_shape[1:]), Flat(part.offset, part.length)))
    return Described(NAMES[part.dtype], part.shape, layout, part.local)


def _is_flat(parameter: nn.Parameter, taken: set[int]) -> bool:
    return id(parameter) in taken or isinstance(parameter, FlatParameter)


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
    return unwrapped(name)


def _view(state: Mapping[str, Any], buffers: set[str], aliases: frozenset[str]) -> ModelView:
    found = ModelView(buffers=buffers)
    tensors: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if not isinstance(name, str):
            raise InvalidArgumentError(f"a state dict's keys are names, not {name!r}")
        if isinstance(value, torch.Tensor) and not _is_extra(name):
            tensors[name] = value
        else:
            found.extra[name] = value
    for same in shared(tensors):
        # transformers lists the names that it drops when it saves; a checkpoint keeps the other one.
        kept = next((name for name in same if name not in aliases), same[0])
        found.tied.update((name, kept) for name in same if name != kept)
    for name, tensor in tensors.items():
        if name not in found.tied:
            found.tensors[name] = describe(tensor, f"model tensor {name!r}")
            found.handles[id(tensor)] = (Handle(name, found.tensors[name]),)
    return found


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == EXTRA
