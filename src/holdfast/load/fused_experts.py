"""What a model has as one tensor, and a checkpoint as several, is read as one: fused experts, split parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from holdfast.engine.plan.split_tensors import Splits, split_ranges
from holdfast.errors import OptimizerMismatchError, StateError
from holdfast.formats.native import NativeReader
from holdfast.formats.reader import Reader
from holdfast.formats.remapped_reader import RemappedReader, TensorMapping, TensorRange, full_range, identity_mapping
from holdfast.ondisk.files import TensorInfo
from holdfast.ondisk.validation import split_state_key, state_key
from holdfast.state.model import traversal as models
from holdfast.state.model.hf_layout import match_by_origin, stored_layout
from holdfast.state.model.state_dict_hooks import has_hooks
from holdfast.state.model.view import ModelView, ParamRef
from holdfast.state.optimizer import adapters
from holdfast.state.optimizer.view import refs_for
from holdfast.state.split_parameters import stored_names
from holdfast.state.training import TrainingObjects

#: The stored tensors of one group.
_Infos = Mapping[str, TensorInfo]

#: The CRCs of a stored tensor of one group.
_Crcs = Callable[[str], Sequence[int] | None]


def with_fused_experts(reader: Reader, training: TrainingObjects) -> Reader:
    """The checkpoint as the models and optimizers see it that it is loaded into."""
    made: dict[str, dict[str, TensorMapping]] = {}
    handles: dict[str, dict[str, ParamRef]] = {}
    views = _split_views(training)
    for slot, parts in models.model_components(training.model).items():
        if slot in reader.groups:
            from_hub = {} if isinstance(reader, NativeReader) else _fused_tensors(parts[0], reader.groups[slot])
            made[slot] = from_hub | _joined(views[slot], reader.groups[slot])
    for slot in adapters.optimizer_components(training.optimizer):
        known = (one for same in (refs_for(slot, views) or {}).values() for one in same)
        handles[slot] = {one.name: one for one in known if one.splits}
        crcs = partial(reader.crcs, slot)
        made[slot] = _joined_states(handles[slot], reader.groups.get(slot, {}), crcs)
    if not any(made.values()) and not any(handles.values()):
        return reader
    table = {group: identity_mapping(infos) for group, infos in reader.groups.items()}
    for slot, found in made.items():
        taken = {name for one in found.values() for name in one.names}
        table[slot] = {name: one for name, one in table.get(slot, {}).items() if name not in taken} | found
    return RemappedReader(reader, table, reader.tied, lambda shared: _told(shared, handles))


def join_experts(reader: Reader) -> dict[str, list[str]]:
    """The stored tensors, by group, that the checkpoint is seen to have under other names, or as parts of others."""
    if not isinstance(reader, RemappedReader):
        return {}
    return {
        group: [one for name, made in names.items() for one in made.names if one != name]
        for group, names in reader.table.items()
    }


def _split_views(training: TrainingObjects) -> dict[str, ModelView]:
    """The models that have hooks on ``state_dict``; an empty view of all others."""
    given = training.named_by if training.model is None else training.model
    return {slot: _split_view(parts) for slot, parts in models.model_components(given).items()}


def _split_view(parts: list[Any]) -> ModelView:
    if any(isinstance(part, nn.Module) and has_hooks(part) for part in parts):
        try:
            return models.build_view(parts)
        except StateError:  # then it is loaded under the names that the modules have
            pass
    return ModelView()


def _fused_tensors(model: object, names: _Infos) -> dict[str, TensorMapping]:
    """The tensors of a model that the checkpoint has under other names, or in parts, all of which are there."""
    if not isinstance(model, nn.Module):
        return {}
    tensors = models.build_load_view([model], names).tensors
    told = stored_layout(model, {name: TensorInfo(one.dtype, one.shape) for name, one in tensors.items()})
    found = {}
    for name, pieces in match_by_origin(told):
        parts = [piece for piece, _ in pieces]
        there = all(part in names and names[part].shape == told[part][0].shape for part in parts)
        if name not in names and there and len({names[part].dtype for part in parts}) == 1:
            info = TensorInfo(names[parts[0]].dtype, tensors[name].shape)
            found[name] = TensorMapping(info, [full_range(part, names[part]) for part in parts])
    return found


def _joined(view: ModelView, names: _Infos) -> dict[str, TensorMapping]:
    """The tensors of a model that are stored in parts, as its hooks on ``state_dict`` say."""
    found = {}
    for name, splits in view.splits.items():
        made = None if name in names else _whole(view.tensors[name].shape, splits, names)
        if made is not None:
            found[name] = made
    return found


def _whole(shape: tuple[int, ...], splits: Splits, names: _Infos) -> TensorMapping | None:
    """A tensor of a shape that is stored in parts, all of which are there."""
    there = all(split.name in names and names[split.name].shape == split.shape for split in splits)
    dtypes = {names[split.name].dtype for split in splits} if there else set()
    if len(dtypes) != 1:
        return None
    info = TensorInfo(dtypes.pop(), shape)
    return TensorMapping(
        info, [TensorRange(name, at, at + run.stop - run.start) for run, name, at in sorted(split_ranges(info, splits))]
    )


def _joined_states(handles: Mapping[str, ParamRef], names: _Infos, crcs: _Crcs) -> dict[str, TensorMapping]:
    """The states of parameters that are stored in parts: joined, or the one that all parts share."""
    states: dict[str, list[str]] = {}
    for key in names:
        fqn, state = split_state_key(key)
        states.setdefault(fqn, []).append(state)
    found = {}
    for handle in handles.values():
        if handle.name not in states:
            for state in states.get(stored_names(handle)[0], ()):
                made = _joined_state(handle, state, names, crcs)
                if made is not None:
                    found[state_key(handle.name, state)] = made
    return found


def _joined_state(handle: ParamRef, state: str, names: _Infos, crcs: _Crcs) -> TensorMapping | None:
    infos = {state_key(name, state): name for name in stored_names(handle)}
    there = {name: names[key] for key, name in infos.items() if key in names}
    if len(there) < len(infos):
        return None
    first, *others = there.values()
    if all(size == 1 for size in first.shape) and all(one == first for one in others):
        is_one = len({tuple(crcs(key) or ()) for key in infos}) == 1
        return (
            TensorMapping(first, [TensorRange(key, 0, 0 if i else first.nbytes) for i, key in enumerate(infos)])
            if is_one
            else None
        )
    made = _whole(handle.like.shape, handle.splits, there)
    if made is None:
        return None
    return TensorMapping(made.info, [one._replace(name=state_key(one.name, state)) for one in made.of])


def _told(shared: Mapping[str, Any], handles: Mapping[str, Mapping[str, ParamRef]]) -> dict[str, Any]:
    """Values with the names that optimizers have here for parameters that are stored in parts."""
    found = dict(shared)
    for slot, known in handles.items():
        if slot in found and known:
            groups = [_joined_group(group, known) for group in found[slot]["groups"]]
            found[slot] = {**found[slot], "groups": groups}
    return found


def _joined_group(group: Mapping[str, Any], handles: Mapping[str, ParamRef]) -> dict[str, Any]:
    listed = set(group["params"])
    names: dict[str, str] = {}
    for handle in handles.values():
        parts = stored_names(handle)
        if handle.name not in listed and listed.issuperset(parts):
            names |= dict.fromkeys(parts, handle.name)
    states: dict[str, Any] = {}
    for name, state in group["state"].items():
        joined = names.get(name, name)
        if states.setdefault(joined, state) != state:
            raise OptimizerMismatchError(
                f"the checkpoint holds different optimizer states, which are no tensors, of the parts of {joined!r}"
            )
    return {**group, "params": list(dict.fromkeys(names.get(name, name) for name in group["params"])), "state": states}
