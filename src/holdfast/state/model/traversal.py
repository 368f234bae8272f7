"""A model's tensors under clean names, whatever wraps it, and its tied weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn
from torch.distributed.fsdp._flat_param import FlatParameter
from torch.nn.parallel import DistributedDataParallel

from holdfast.engine.plan.placements import FlatSharded, MeshShape, PlacementLayout, Replicated
from holdfast.engine.plan.split_tensors import Splits
from holdfast.errors import InvalidArgumentError, StateError
from holdfast.ondisk.validation import strip_wrapper_prefixes
from holdfast.state.components import name_components
from holdfast.state.model import fsdp1
from holdfast.state.model.fsdp1 import FlatShard
from holdfast.state.model.hf_config import unwrap_model
from holdfast.state.model.load_hooks import HookedLoader
from holdfast.state.model.replaced_entries import ReplacedModel
from holdfast.state.model.state_dict_hooks import HookedStateDict, has_hooks, state_dict_names
from holdfast.state.model.state_dict_hooks import hooked_state_dict as hooked
from holdfast.state.model.view import EXTRA, ModelView, ParamRef, is_extra, merge_views
from holdfast.state.tensors import NAMES, TensorView, check_kind, find_shared, view_of


def model_components(model: object) -> dict[str, list[Any]]:
    """The models passed, by slot; each a list of its parts."""
    return name_components("model", model, _is_state_dict)


def _is_state_dict(given: Mapping[str, Any]) -> bool:
    return not given or not all(isinstance(one, nn.Module | Mapping | list | tuple) for one in given.values())


def build_view(parts: Sequence[object], *, hooks: bool = True) -> ModelView:
    """Look at the parts of one model, modules or state dicts.

    With ``hooks`` tensors have the names that ``state_dict`` says, after its hooks; without, those that the modules
    have for them. Raises ``StateError`` where two different tensors have one name, or hooks say something that could
    not be put back.
    """
    views = [_view_part(part, hooks=hooks) for part in parts]
    if len(views) == 1:
        return views[0]
    whole = ModelView()
    for one in views:
        merge_views(whole, one)
    return whole


def build_load_view(parts: Sequence[object], stored: Collection[str]) -> ModelView:
    """The same for a load: as ``state_dict`` says, but where the stored names are those that the modules have."""
    if not any(isinstance(part, nn.Module) and has_hooks(part) for part in parts):
        return build_view(parts)
    as_held = build_view(parts, hooks=False)
    try:
        said = build_view(parts)
    except StateError:
        return as_held
    is_less = said.tensors.keys() < as_held.tensors.keys() or any(name not in stored for name in said.tensors)
    return as_held if is_less and all(name in stored for name in as_held.tensors) else said


def _view_part(model: object, *, hooks: bool) -> ModelView:
    if isinstance(model, nn.Module):
        return _view_fsdp1(model) if fsdp1.wrapped_modules(model) else _view_module(model, hooks=hooks)
    if isinstance(model, ReplacedModel):
        return _view_replaced(model)
    if isinstance(model, MutableMapping):
        found = _view(dict(model), set(), frozenset())
        found.owners = {name: (model, name) for name in found.extra}
        return found
    raise InvalidArgumentError(
        f"model must be a torch.nn.Module or a state dict, or a list or dict of them, not {type(model).__qualname__}"
    )


def _view_module(model: nn.Module, *, hooks: bool) -> ModelView:
    module = unwrap_model(model)
    parts = _wrapper_prefixes(module)
    said = hooked(module) if hooks else HookedStateDict(state_dict_names(module) | dict(_extra_states(module)))
    if said.made:
        raise StateError(
            f"{_clean(said.made[0], parts)!r} in the model's state_dict is made up by a hook or an override: neither a "
            "tensor of the model nor a part of one, it could not be put back; pass state_dict_hooks=False to save the "
            "parameters, buffers and extra state as the model has them, and nothing else that its state_dict says"
        )
    state: dict[str, Any] = {}
    raw_names: dict[str, str] = {}
    for raw, value in said.values.items():
        name = _clean(raw, parts)
        if name in state:
            raise StateError(f"the model has two entries named {name!r} once wrappers' names are taken off")
        state[name] = value
        raw_names[name] = raw
    parameters = {id(parameter) for parameter in module.parameters()}
    buffers = {name for name, value in state.items() if isinstance(value, torch.Tensor) and id(value) not in parameters}
    splits = {
        _clean(raw, parts): tuple(replace(split, name=_clean(split.name, parts)) for split in found)
        for raw, found in said.splits.items()
    }
    found = _view(state, buffers, frozenset(getattr(module, "_tied_weights_keys", None) or ()), splits)
    found.owners = {name: (module, raw_names[name]) for name in found.extra}
    found.loaders = [HookedLoader(module, raw_names, frozenset(said.splits))]
    return found


def _extra_states(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, part in module.named_modules(remove_duplicate=False):
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            yield f"{path}.{EXTRA}" if path else EXTRA, part.get_extra_state()


def _view_replaced(model: ReplacedModel) -> ModelView:
    own = _view_part(model.module, hooks=True)
    entries = {strip_wrapper_prefixes(name): value for name, value in model.entries.items()}
    found = _view(entries, own.buffers & entries.keys(), frozenset(own.tied))
    found.handles = own.handles
    return found


def _view_fsdp1(model: nn.Module) -> ModelView:
    """FSDP1's flat parameters, and beside them what it leaves alone: buffers, ignored parameters, extra state."""
    found = ModelView()
    taken = set()
    for part in fsdp1.flat_parts(model):
        handle = ParamRef(part.fqn, _describe_flat(part), part)
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
    merge_views(found, rest)
    found.loaders = [HookedLoader(model)]
    return found


def _describe_flat(part: FlatShard) -> TensorView:
    mesh = MeshShape(part.mesh_shape, part.mesh_ranks)
    layout = PlacementLayout(
        mesh, (*(Replicated() for _ in part.mesh_shape[1:]), FlatSharded(part.offset, part.length))
    )
    return TensorView(NAMES[part.dtype], part.shape, layout, part.local)


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
    return strip_wrapper_prefixes(name)


def _view(
    state: Mapping[str, Any],
    buffers: set[str],
    aliases: frozenset[str],
    splits: Mapping[str, Splits] = MappingProxyType({}),
) -> ModelView:
    found = ModelView(buffers=buffers)
    tensors: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if not isinstance(name, str):
            raise InvalidArgumentError(f"a state dict's keys are names, not {name!r}")
        if isinstance(value, torch.Tensor) and not is_extra(name):
            check_kind(value, f"model tensor {name!r}")
            tensors[name] = value
        else:
            found.extra[name] = value
    for same in find_shared(tensors):
        # transformers lists the names that it drops when it saves; a checkpoint keeps the other one.
        kept = next((name for name in same if name not in aliases), same[0])
        found.tied.update((name, kept) for name in same if name != kept)
    for name, tensor in tensors.items():
        if name not in found.tied:
            found.tensors[name] = view_of(tensor, f"model tensor {name!r}")
            found.splits |= {name: splits[name]} if name in splits else {}
            found.handles[id(tensor)] = (ParamRef(name, found.tensors[name], splits=splits.get(name, ())),)
    return found
