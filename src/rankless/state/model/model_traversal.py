"""Views of models: their tensors under clean names, without wrappers' prefixes, and their tied weights.

:mod:`rankless.state.capture` calls :func:`build_view` on each rank in the first vote of a save,
:mod:`rankless.state.restore` calls :func:`build_load_view` in the vote "reading the metadata". The names are in files:
wrappers, and the order of modules, must not change them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn
from torch.distributed.fsdp._flat_param import FlatParameter
from torch.nn.parallel import DistributedDataParallel

from rankless.engine.plan.layout_types import FlatSharded, MeshShape, PlacementLayout, Replicated
from rankless.engine.plan.split_tensors import Splits
from rankless.errors import InvalidArgumentError, StateError, UnsupportedTensorError
from rankless.ondisk.value_files import TORCHAO
from rankless.state.components import name_components
from rankless.state.model import fsdp1
from rankless.state.model.flat_model import FlatModel
from rankless.state.model.flat_shards import FlatShard
from rankless.state.model.hf_config import unwrap_model
from rankless.state.model.load_hooks import HookedLoader
from rankless.state.model.model_view import EXTRA, ModelView, Owner, ParamRef, is_extra, merge_views
from rankless.state.model.replaced_entries import ReplacedModel
from rankless.state.model.state_dict_hooks import HookedStateDict, has_own_state_dict, state_dict_names
from rankless.state.model.state_dict_hooks import hooked_state_dict as hooked
from rankless.state.model.wrapper_modules import NameCleaner
from rankless.state.tensor_subclasses import is_wrapper, view_outside, view_wrapper
from rankless.state.tensor_views import NAMES, TensorView, check_kind, is_plain, local_tensor, view_of
from rankless.state.tied_weights import find_tied


def model_components(model: object) -> dict[str, list[Any]]:
    """Return the models passed, by slot. Each is a list of its parts."""
    return name_components("model", model, _is_state_dict)


def _is_state_dict(given: Mapping[str, Any]) -> bool:
    return not given or not all(isinstance(value, nn.Module | Mapping | list | tuple) for value in given.values())


def build_view(parts: Sequence[object], *, hooks: bool = True) -> ModelView:
    """Return a view of the parts of one model, which are modules or state dicts.

    With ``hooks`` tensors have the names that ``state_dict`` returns, after its hooks; without, the modules' own names.
    Raises ``StateError`` if two different tensors have one name, or if hooks return tensors that could not be loaded
    back.
    """
    views = [_view_part(part, hooks=hooks) for part in parts]
    if len(views) == 1:
        return views[0]
    merged = ModelView()
    for view in views:
        merge_views(merged, view)
    return merged


def build_load_view(parts: Sequence[object], stored: Collection[str]) -> ModelView:
    """Return a view for a load: like :func:`build_view`, but without hooks if the stored names are the modules' own."""
    if not any(isinstance(part, nn.Module) and has_own_state_dict(part) for part in parts):
        return build_view(parts)
    unhooked = build_view(parts, hooks=False)
    try:
        hooked_view = build_view(parts)
    except StateError:
        return unhooked
    is_incomplete = hooked_view.tensors.keys() < unhooked.tensors.keys() or any(
        name not in stored for name in hooked_view.tensors
    )
    return unhooked if is_incomplete and all(name in stored for name in unhooked.tensors) else hooked_view


def _view_part(model: object, *, hooks: bool) -> ModelView:
    if isinstance(model, nn.Module):
        return _view_fsdp1(model) if fsdp1.uses_fsdp1(model) else _view_module(model, hooks=hooks)
    if isinstance(model, FlatModel):
        return _view_flat_model(model)
    if isinstance(model, ReplacedModel):
        return _view_replaced(model)
    if isinstance(model, MutableMapping):
        view = _view_entries(dict(model), set(), frozenset())
        view.owners = {name: [Owner(model, name, value)] for name, value in view.extra.items()}
        return view
    raise InvalidArgumentError(
        f"model must be a torch.nn.Module or a state dict, or a list or dict of them; got {type(model).__qualname__}"
    )


def _view_module(model: nn.Module, *, hooks: bool) -> ModelView:
    module = unwrap_model(model)
    clean_name = NameCleaner(module)
    for name, parameter in module.named_parameters():
        if not is_wrapper(parameter):
            check_kind(parameter, f"model tensor {clean_name(name)!r}")
    runs_before = any(submodule._state_dict_pre_hooks for submodule in module.modules())  # noqa: SLF001
    if hooks and (runs_before or has_own_state_dict(module)):
        result = hooked(module)
        left_out = _find_left_out(module, result.values)
    else:
        result, left_out = HookedStateDict(state_dict_names(module) | dict(_extra_states(module))), {}
    if result.computed:
        raise StateError(
            f"{clean_name(result.computed[0])!r} in the model's state_dict is computed by a hook or an "
            "override: neither a tensor of the model nor a part of one, it could not be loaded back; pass "
            "state_dict_hooks=False to save the parameters, buffers and extra state as the model has them, and nothing "
            "else that its state_dict returns"
        )
    state: dict[str, Any] = {}
    raw_names: dict[str, str] = {}
    for raw_name, value in result.values.items():
        name = clean_name(raw_name)
        if name in state:
            raise StateError(f"the model has two entries named {name!r} after wrappers' prefixes are removed")
        state[name] = value
        raw_names[name] = raw_name
    parameters = {id(parameter) for parameter in module.parameters()}
    buffers = {name for name, value in state.items() if isinstance(value, torch.Tensor) and id(value) not in parameters}
    splits = {
        clean_name(raw_name): tuple(replace(split, name=clean_name(split.name)) for split in raw_splits)
        for raw_name, raw_splits in result.splits.items()
    }
    view = _view_entries(state, buffers, frozenset(getattr(module, "_tied_weights_keys", None) or ()), splits)
    view.owners = {name: [Owner(module, raw_names[name], value)] for name, value in view.extra.items()}
    overwritten = _overwritten_buffers(model)
    view.overwritten = {name for name in buffers if id(state.get(name)) in overwritten}
    view.loaders = [HookedLoader(module, raw_names, frozenset(result.splits))]
    view.left_out = {clean_name(raw_name): tensor for raw_name, tensor in left_out.items()}
    return view


def _find_left_out(module: nn.Module, returned: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    tensors, ids = state_dict_names(module), {id(value) for value in returned.values()}
    kept = {name for name, tensor in tensors.items() if id(tensor) in ids}
    if len(kept) == len(tensors):
        return {}
    places = {_place_in_memory(tensors[name]) for name in kept}
    return {name: tensor for name, tensor in tensors.items() if _place_in_memory(tensor) not in places}


def _place_in_memory(tensor: torch.Tensor) -> object:
    """Return a value that is equal for tensors that are the same elements."""
    local = local_tensor(tensor)
    if local.layout != torch.strided or local.is_meta or not local.numel():
        return id(tensor)
    return local.device, local.data_ptr(), local.dtype, local.shape, local.stride()


def _extra_states(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, submodule in module.named_modules(remove_duplicate=False):
        if type(submodule).get_extra_state is not nn.Module.get_extra_state:
            yield f"{path}.{EXTRA}" if path else EXTRA, submodule.get_extra_state()


def _view_replaced(model: ReplacedModel) -> ModelView:
    module_view = _view_part(model.module, hooks=True)
    clean_name = NameCleaner(model.module)
    entries = {clean_name(name): value for name, value in model.entries.items()}
    view = _view_entries(entries, module_view.buffers & entries.keys(), frozenset(module_view.tied))
    view.refs = module_view.refs
    return view


def _view_fsdp1(model: nn.Module) -> ModelView:
    """Return a view of a model under FSDP1.

    It has the flat parameters and all that FSDP1 does not manage: buffers, ignored parameters, extra state.
    """
    view = _view_shards(fsdp1.flat_shards(model))
    _add_unmanaged(view, model)
    view.loaders = [HookedLoader(model)]
    return view


def _view_flat_model(model: FlatModel) -> ModelView:
    """Return a view of a model that has its parameters in another system. No hooks of it are run."""
    view = _view_shards(model.shards)
    for name, tensor in model.replaced.items():
        view.tensors[name] = view_of(tensor, f"model tensor {name!r}")
        view.refs[id(tensor)] = (ParamRef(name, view.tensors[name]),)
    view.tied.update(model.tied)
    _add_unmanaged(view, model.module)
    return view


def _view_shards(shards: Iterable[FlatShard]) -> ModelView:
    view = ModelView()
    for shard in shards:
        ref = ParamRef(shard.fqn, _describe_flat(shard), shard)
        view.tensors[shard.fqn] = ref.tensor
        view.tied.update(dict.fromkeys(shard.tied, shard.fqn))
        view.refs[id(shard.parameter)] = (*view.refs.get(id(shard.parameter), ()), ref)
        view.frozen |= set() if shard.parameter.requires_grad else {shard.fqn}
    return view


def _add_unmanaged(view: ModelView, model: nn.Module) -> None:
    """Add the tensors of a module that are not in a view of its flat parameters, and its extra state."""
    flat_ids, named = set(view.refs), {*view.tensors, *view.tied}
    state: dict[str, Any] = {}
    buffers: set[str] = set()
    for name, module in fsdp1.named_modules(model):
        prefix = f"{name}." if name else ""
        parameters = {key: value for key, value in module._parameters.items() if value is not None}  # noqa: SLF001
        state.update(
            (prefix + key, value)
            for key, value in parameters.items()
            if not _is_flat(value, flat_ids) and prefix + key not in named
        )
        persistent = {key for key in module._buffers if key not in module._non_persistent_buffers_set}  # noqa: SLF001
        named_buffers = {
            prefix + key: module._buffers[key]  # noqa: SLF001
            for key in persistent
            if module._buffers[key] is not None  # noqa: SLF001
        }
        buffers |= named_buffers.keys()
        state |= named_buffers
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            state[prefix + EXTRA] = module.get_extra_state()
            view.owners[prefix + EXTRA] = [Owner(module, EXTRA, state[prefix + EXTRA])]
    unmanaged = _view_entries(state, buffers, frozenset())
    merge_views(view, unmanaged)


def _describe_flat(shard: FlatShard) -> TensorView:
    mesh = MeshShape(shard.mesh_shape, shard.mesh_ranks)
    layout = PlacementLayout(
        mesh, (*(Replicated() for _ in shard.mesh_shape[1:]), FlatSharded(shard.offset, shard.length))
    )
    return TensorView(NAMES[shard.dtype], shard.shape, layout, shard.local)


def _is_flat(parameter: nn.Parameter, flat_ids: set[int]) -> bool:
    return id(parameter) in flat_ids or isinstance(parameter, FlatParameter)


def _overwritten_buffers(model: nn.Module) -> set[int]:
    """Return the ``id`` of the buffers that DDP replaces before each step by the buffers of rank 0 of its group."""
    return {
        id(buffer)
        for ddp in model.modules()
        if isinstance(ddp, DistributedDataParallel)
        and ddp.broadcast_buffers
        and ddp.modules_buffers  # DDP looks for buffers again only if it had some when it was made
        and ddp.process_group.rank() > 0
        and not hasattr(ddp, "buffer_hook")  # code of the user, which may do anything
        for name, buffer in ddp.module.named_buffers()
        if name not in ddp.parameters_to_ignore
    }


def _view_entries(
    state: Mapping[str, Any],
    buffers: set[str],
    aliases: frozenset[str],
    splits: Mapping[str, Splits] = MappingProxyType({}),
) -> ModelView:
    tensors, extra = _separate_tensors(state)
    view = ModelView(extra=extra, buffers=buffers - extra.keys())  # extra state may be a tensor
    wrappers = {name for name, tensor in tensors.items() if is_wrapper(tensor)}
    for name, tensor in tensors.items():
        if not is_plain(tensor) and name not in wrappers:
            check_kind(tensor, f"model tensor {name!r}")
    for tied_names in find_tied(tensors):
        # transformers lists the names that it leaves out when it saves; a checkpoint keeps the other one.
        kept = next((name for name in tied_names if name not in aliases), tied_names[0])
        view.tied.update((name, kept) for name in tied_names if name != kept)
    for name, tensor in tensors.items():
        if name in wrappers:
            _add_wrapper(view, name, tensor, state, splits)
        elif name not in view.tied:
            viewed = view.tensors[name] = view_of(tensor, f"model tensor {name!r}")
            if name in splits:
                view.splits[name] = splits[name]
            if type(tensor) is not torch.Tensor and _is_frozen(tensor):
                view.frozen.add(name)
            view.refs[id(tensor)] = (ParamRef(name, viewed, splits=splits.get(name, ())),)
    return view


def _separate_tensors(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors of a state dict, and its other values."""
    tensors, extra = dict[str, torch.Tensor](), dict[str, Any]()
    for name, value in state.items():
        if not isinstance(name, str):
            raise InvalidArgumentError(f"the keys of a state dict must be strings; got {name!r}")
        if isinstance(value, torch.Tensor) and not is_extra(name):
            tensors[name] = value
        else:
            extra[name] = value
    return tensors, extra


def _is_frozen(tensor: torch.Tensor) -> bool:
    return not tensor.requires_grad and isinstance(tensor, nn.Parameter)


def _add_wrapper(
    view: ModelView, name: str, tensor: torch.Tensor, state: Mapping[str, Any], splits: Mapping[str, Splits]
) -> None:
    """Add a tensor of a wrapper subclass. Its inner tensors follow it in the names that it is tied to."""
    subject = f"model tensor {name!r}"
    wrapper = view_wrapper(tensor, subject)
    names = {inner: f"{name}.{inner}" for inner in wrapper.inner}
    taken = next((stored for stored in names.values() if stored in state), None)
    if taken is not None:
        raise StateError(
            f"{subject} is a tensor subclass with an inner tensor whose name is taken: {taken!r}; rename it"
        )
    if name in splits:
        raise UnsupportedTensorError(
            f"{subject} is a tensor subclass that the model's state_dict hooks split: pass state_dict_hooks=False"
        )
    from rankless.state.torchao_description import describe_for_torchao  # noqa: PLC0415 - few models have such tensors

    torchao = describe_for_torchao(local_tensor(tensor), tuple(tensor.shape))
    view.wrappers[name] = {**wrapper.description, **({TORCHAO: torchao} if torchao else {})}
    kept = view.tied.pop(name, None)
    if kept is not None:
        view.tied.update((stored, f"{kept}.{inner}") for inner, stored in names.items())
        return
    view.tensors.update((stored, wrapper.inner[inner]) for inner, stored in names.items())
    view.buffers |= {*names.values()} if name in view.buffers else set()
    view.frozen |= {*names.values()} if _is_frozen(tensor) else set()
    view.refs[id(tensor)] = (ParamRef(name, view_outside(tensor, subject)),)
