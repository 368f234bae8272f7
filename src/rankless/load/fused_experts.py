"""Joins stored tensors that are one tensor in the model: fused experts, parameters split by ``state_dict`` hooks.

:mod:`rankless.load.load_operation` wraps its reader so on each rank, in the vote "reading the metadata". Ranks may join
other tensors, if their models differ. The joined parts must cover each element once; the stored tensors keep their
numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from rankless.engine.plan.split_tensors import Splits, split_ranges
from rankless.errors import MismatchError, OptimizerMismatchError, StateError
from rankless.formats.native import NativeReader
from rankless.formats.reader import Reader, original_reader
from rankless.formats.remapped_reader import NamedRange, RemappedReader, TensorMapping, identity_mapping
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.validation import split_state_key, state_key
from rankless.state.mismatches import format_lines
from rankless.state.model import model_traversal as models
from rankless.state.model.fused_layout import stored_layout
from rankless.state.model.model_view import ModelView, ParamRef
from rankless.state.model.state_dict_hooks import has_hooks
from rankless.state.optimizer import adapters
from rankless.state.optimizer.optimizer_view import refs_for
from rankless.state.split_parameters import stored_names
from rankless.state.training import TrainingObjects

#: The stored tensors of one group.
_Infos = Mapping[str, TensorInfo]

#: The CRCs of a stored tensor of one group.
_Crcs = Callable[[str], Sequence[int] | None]


def with_fused_experts(reader: Reader, training: TrainingObjects) -> Reader:
    """Return a reader with the tensor names of the models and optimizers that the checkpoint is loaded into."""
    joined: dict[str, dict[str, TensorMapping]] = {}
    refs: dict[str, dict[str, ParamRef]] = {}
    fused_refs: dict[str, dict[str, ParamRef]] = {}
    views = _split_views(training)
    for component, modules in models.model_components(training.model).items():
        if component in reader.groups:
            infos = reader.groups[component]
            fused_refs[component] = (
                {} if isinstance(original_reader(reader), NativeReader) else _fused_refs(modules[0], infos, reader)
            )
            joined[component] = _fused_tensors(fused_refs[component], infos) | _joined_tensors(views[component], infos)
    for component in adapters.optimizer_components(training.optimizer):
        all_refs = (ref for same_param in (refs_for(component, views) or {}).values() for ref in same_param)
        fused = fused_refs.get("model" + component.removeprefix("optimizer"), {})
        refs[component] = _refs_of_own_tensors(fused) if fused else {}
        refs[component] = {**refs[component], **{ref.name: ref for ref in all_refs if ref.splits}}
        crcs = partial(reader.block_crcs, component)
        joined[component] = _joined_states(refs[component], reader.groups.get(component, {}), crcs)
    if not any(joined.values()) and not any(refs.values()):
        return reader
    table = {group: identity_mapping(infos) for group, infos in reader.groups.items()}
    for component, mappings in joined.items():
        used = {name for mapping in mappings.values() for name in mapping.names}
        unchanged = {name: mapping for name, mapping in table.get(component, {}).items() if name not in used}
        table[component] = unchanged | mappings
    return RemappedReader(reader, table, reader.tied, lambda shared: _rename_values(shared, refs))


def renamed_tensors(reader: Reader) -> dict[str, list[str]]:
    """Return, by group, the stored tensors that ``reader`` renames, or joins with others."""
    if not isinstance(reader, RemappedReader):
        return {}
    return {
        group: [stored for name, mapping in mappings.items() for stored in mapping.names if stored != name]
        for group, mappings in reader.table.items()
    }


def _split_views(training: TrainingObjects) -> dict[str, ModelView]:
    """Return a view of each model; the view of a model without ``state_dict`` hooks is empty."""
    model = training.naming_model if training.model is None else training.model
    return {component: _split_view(modules) for component, modules in models.model_components(model).items()}


def _split_view(modules: list[Any]) -> ModelView:
    if any(isinstance(module, nn.Module) and has_hooks(module) for module in modules):
        try:
            return models.build_view(modules)
        except StateError:  # then it is loaded under the names that the modules have
            pass
    return ModelView()


def _fused_refs(model: object, infos: _Infos, reader: Reader) -> dict[str, ParamRef]:
    """Return the tensors of a model that the checkpoint has renamed or split, if all their ranges are stored.

    Raises ``MismatchError`` if they are there in a form that does not fit.
    """
    if not isinstance(model, nn.Module):
        return {}
    tensors = models.build_load_view([model], infos).tensors
    layout = stored_layout(model, {name: TensorInfo(tensor.dtype, tensor.shape) for name, tensor in tensors.items()})
    named = {
        name: splits
        for name, splits in layout.splits.items()
        if all(split.name in infos and split.name not in tensors for split in splits)
    }
    refs = {name: ParamRef(name, tensors[name], splits=named[name]) for name in named if name not in infos}
    problems = [problem for ref in refs.values() if (problem := _find_misfit(ref, infos))]
    joined = {name for ref in refs.values() for name in stored_names(ref)}
    problems += [
        f"{name}: in the checkpoint twice, by itself and as a part of {splits[0].name}: remove one of them"
        for name, splits in named.items()
        if name in infos and any(split.name in joined for split in splits)
    ]
    if problems:
        raise MismatchError(
            f"{reader.path} does not match what it is loaded into; nothing was changed:\n{format_lines(problems)}"
        )
    return refs


def _find_misfit(ref: ParamRef, infos: _Infos) -> str | None:
    """Describe the misfit of the stored tensors that a tensor of a model consists of. Return ``None`` if they fit."""
    for split in ref.splits:
        if infos[split.name].shape != split.shape:
            return (
                f"{split.name}: shape {list(infos[split.name].shape)} in the checkpoint, {list(split.shape)} here, "
                f"for {ref.name}"
            )
    dtypes = {infos[split.name].dtype: split.name for split in ref.splits}
    if len(dtypes) > 1:
        parts = ", ".join(f"{name} is {dtype}" for dtype, name in sorted(dtypes.items()))
        return f"{ref.name}: its parts have several dtypes in the checkpoint ({parts}): convert it to one dtype"
    return None


def _refs_of_own_tensors(refs: Mapping[str, ParamRef]) -> dict[str, ParamRef]:
    """Return the tensors that share no stored tensor with another one: its optimizer states are theirs alone."""
    uses = Counter(name for ref in refs.values() for name in stored_names(ref))
    return {name: ref for name, ref in refs.items() if all(uses[stored] == 1 for stored in stored_names(ref))}


def _fused_tensors(refs: Mapping[str, ParamRef], infos: _Infos) -> dict[str, TensorMapping]:
    """Return the tensors joined from the stored tensors that they consist of."""
    mappings = {name: _join_splits(ref.tensor.shape, ref.splits, infos) for name, ref in refs.items()}
    return {name: mapping for name, mapping in mappings.items() if mapping is not None}


def _joined_tensors(view: ModelView, infos: _Infos) -> dict[str, TensorMapping]:
    """Return the tensors of a model that its ``state_dict`` hooks have split and the checkpoint stores split."""
    mappings = {}
    for name, splits in view.splits.items():
        mapping = None if name in infos else _join_splits(view.tensors[name].shape, splits, infos)
        if mapping is not None:
            mappings[name] = mapping
    return mappings


def _join_splits(shape: tuple[int, ...], splits: Splits, infos: _Infos) -> TensorMapping | None:
    """Return the tensor with this shape joined from its splits, or ``None`` if not all of them are stored."""
    is_complete = all(split.name in infos and infos[split.name].shape == split.shape for split in splits)
    dtypes = {infos[split.name].dtype for split in splits} if is_complete else set()
    if len(dtypes) != 1:
        return None
    info = TensorInfo(dtypes.pop(), shape)
    return TensorMapping(
        info,
        [
            NamedRange(name, at, at + elements.stop - elements.start)
            for elements, name, at in sorted(split_ranges(info, splits))
        ],
    )


def _joined_states(refs: Mapping[str, ParamRef], infos: _Infos, crcs: _Crcs) -> dict[str, TensorMapping]:
    """Return the states of split parameters: joined from their splits, or the one state that all splits share."""
    states: dict[str, list[str]] = {}
    for key in infos:
        fqn, state = split_state_key(key)
        states.setdefault(fqn, []).append(state)
    mappings = {}
    for ref in refs.values():
        if ref.name not in states:
            for state in states.get(stored_names(ref)[0], ()):
                mapping = _joined_state(ref, state, infos, crcs)
                if mapping is not None:
                    mappings[state_key(ref.name, state)] = mapping
    return mappings


def _joined_state(ref: ParamRef, state: str, infos: _Infos, crcs: _Crcs) -> TensorMapping | None:
    names = {state_key(name, state): name for name in stored_names(ref)}
    stored = {name: infos[key] for key, name in names.items() if key in infos}
    if len(stored) < len(names):
        return None
    first, *others = stored.values()
    if all(size == 1 for size in first.shape) and all(info == first for info in others):
        is_shared = len({tuple(crcs(key) or ()) for key in names}) == 1
        return (
            TensorMapping(first, [NamedRange(key, 0, 0 if i else first.nbytes) for i, key in enumerate(names)])
            if is_shared
            else None
        )
    mapping = _join_splits(ref.tensor.shape, ref.splits, stored)
    if mapping is None:
        return None
    ranges = [stored_range._replace(name=state_key(stored_range.name, state)) for stored_range in mapping.ranges]
    return TensorMapping(mapping.info, ranges)


def _rename_values(shared: Mapping[str, Any], refs: Mapping[str, Mapping[str, ParamRef]]) -> dict[str, Any]:
    """Return the shared values with the optimizers' names of split parameters instead of the stored names."""
    values = dict(shared)
    for component, component_refs in refs.items():
        if component in values and component_refs:
            groups = [_join_param_group(group, component_refs) for group in values[component]["groups"]]
            values[component] = {**values[component], "groups": groups}
    return values


def _join_param_group(group: Mapping[str, Any], refs: Mapping[str, ParamRef]) -> dict[str, Any]:
    params = set(group["params"])
    new_names: dict[str, str] = {}
    for ref in refs.values():
        splits = stored_names(ref)
        if ref.name not in params and params.issuperset(splits):
            new_names |= dict.fromkeys(splits, ref.name)
    states: dict[str, Any] = {}
    for name, state in group["state"].items():
        new_name = new_names.get(name, name)
        if states.setdefault(new_name, state) != state:
            raise OptimizerMismatchError(
                f"the checkpoint holds different values in the optimizer states of the splits of {new_name!r}; "
                "they cannot be joined"
            )
    new_params = list(dict.fromkeys(new_names.get(name, name) for name in group["params"]))
    return {**group, "params": new_params, "state": states}
