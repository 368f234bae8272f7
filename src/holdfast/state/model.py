"""A model's tensors under clean names, whatever wraps it, and its tied weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import FlatParameter
from torch.nn.parallel import DistributedDataParallel

from holdfast.engine.layouts import Flat, Layout, Mesh, Replicate
from holdfast.errors import InvalidArgumentError, StateError
from holdfast.state import fsdp1
from holdfast.state.fsdp1 import FlatPart
from holdfast.state.slots import by_slot
from holdfast.state.tensors import NAMES, Described, describe, shared

#: Attributes by which wrappers hold the module they wrap, where only wrappers use the name.
_WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})

#: The name under which ``state_dict`` keeps what ``get_extra_state`` returns.
_EXTRA = "_extra_state"


@dataclass(frozen=True)
class Handle:
    """A parameter as an optimizer knows it: its name, and what its states are laid out like.

    ``flat`` tells where it is in a flat parameter of FSDP1, several of which an optimizer may know as one.
    """

    name: str
    like: Described
    flat: FlatPart | None = None


@dataclass
class ModelView:
    """A model as a checkpoint sees it.

    ``tensors`` are live, each once, by FQN; ``twins`` are further ones that several parts of the model have under one
    name; ``tied`` maps further names of one to the name it has there. ``handles`` are the parameters by ``id``.
    ``extra`` are values of a state dict that are not tensors, and what ``get_extra_state`` gave, by name, with
    ``owners`` of them to be given them back under the name that they have there.
    """

    tensors: dict[str, Described] = field(default_factory=dict)
    twins: list[tuple[str, Described]] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)
    handles: dict[int, tuple[Handle, ...]] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    owners: dict[str, tuple[nn.Module | MutableMapping[str, Any], str]] = field(default_factory=dict)

    def put_extra(self, name: str, value: object) -> None:
        """Give back one of ``extra``."""
        owner, inside = self.owners[name]
        if isinstance(owner, nn.Module):
            owner.get_submodule(inside.removesuffix(_EXTRA).removesuffix(".")).set_extra_state(value)
        else:
            owner[inside] = value


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
        _merge(whole, one)
    return whole


def _merge(whole: ModelView, one: ModelView) -> None:
    for name, tensor in one.tensors.items():
        known = whole.tensors.setdefault(name, tensor)
        if known.local is not tensor.local:
            if (known.dtype, known.shape, known.layout) != (tensor.dtype, tensor.shape, tensor.layout):
                raise StateError(f"two parts of the model have different tensors named {name!r}")
            whole.twins.append((name, tensor))
    whole.twins += one.twins
    for mine, others in ((whole.tied, one.tied), (whole.extra, one.extra), (whole.owners, one.owners)):
        mine.update(others)  # type: ignore[arg-type]
    whole.buffers |= one.buffers
    whole.handles |= one.handles


def check_twins(found: ModelView) -> None:
    """Raise ``StateError`` where parts of a model hold different values under one name."""
    for name, tensor in found.twins:
        if not torch.equal(tensor.local, found.tensors[name].local):
            raise StateError(f"two parts of the model hold different values of {name!r}; give them names of their own")


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
            state[prefix + _EXTRA] = module.get_extra_state()
            found.owners[prefix + _EXTRA] = (module, _EXTRA)
    rest = _view(state, buffers, frozenset())
    rest.owners = found.owners
    _merge(found, rest)
    return found


def _describe_flat(part: FlatPart) -> Described:
    mesh = Mesh(part.mesh_shape, part.mesh_ranks)
    layout = Layout(mesh, (*(Replicate() for _ in part.mesh_shape[1:]), Flat(part.offset, part.length)))
    return Described(NAMES[part.dtype], part.shape, layout, part.local)


def _is_flat(parameter: nn.Parameter, taken: set[int]) -> bool:
    return id(parameter) in taken or isinstance(parameter, FlatParameter)


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DDP, FSDP1 and ``torch.compile``."""
    while True:
        if isinstance(model, DistributedDataParallel | FullyShardedDataParallel):
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
    return name.rpartition(".")[2] == _EXTRA


def companions(parts: Sequence[object]) -> Iterator[tuple[str, bytes]]:
    """The files that make a folder of weights a transformers model: its configurations. None for other models."""
    module = unwrap(parts[0]) if isinstance(parts[0], nn.Module) else None
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "save_pretrained") or not hasattr(config, "to_json_string"):
        return
    config = copy.deepcopy(config)
    # fully_shard() puts classes of its own before the model's; transformers must find the one it knows.
    kind = next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))
    config.architectures = [kind.__name__]
    if isinstance(dtype := getattr(module, "dtype", None), torch.dtype):
        config.dtype = str(dtype).removeprefix("torch.")
    yield "config.json", config.to_json_string().encode()
    generation = getattr(module, "generation_config", None)
    if generation is not None and hasattr(generation, "to_json_string"):
        yield "generation_config.json", generation.to_json_string().encode()
